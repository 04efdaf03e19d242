"""What runs, in which order: Prefect flows, their configuration, the command line. Never imports torch.

Importing this package prepares the environment (`flows.environment`), because Prefect reads its settings when it is imported.
"""

from flows.environment import prepare

prepare()
