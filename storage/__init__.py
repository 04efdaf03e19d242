"""Everything onecopy keeps: files on local disk or in an object store, the ledger that says which stage of a run is
finished, the Arrow datasets the stages exchange, the prompts they start from, and the checkpoints. A stage is finished
when its manifest exists; the manifest is written last and nothing it names is ever changed. The package is light (no
torch, no Ray, no Prefect) and knows nobody else, so a run can be read with it, or with pyarrow alone, on any machine.
"""
