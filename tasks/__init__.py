"""One stage a file: a pure stage function, and an idempotent Prefect task around it. Never imports torch."""
