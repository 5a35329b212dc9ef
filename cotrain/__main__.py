"""`python -m cotrain`, which is the command `cotrain`. It is named by a string, because nothing here imports pipelines."""

import runpy

if __name__ == "__main__":
    runpy.run_module("pipelines.cli", run_name="__main__")
