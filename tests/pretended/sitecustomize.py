"""With this folder in PYTHONPATH and PRETENDED_GPUS=N, each Python process that imports torch has N
pretended GPUs."""

import importlib.machinery
import os
import sys


class AfterTorch:
    """Finds torch as usual, and pretends when it has been imported."""

    def find_spec(self, name, path=None, target=None):
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        usual = spec.loader.exec_module

        def exec_module(module):
            usual(module)
            import gpus

            gpus.pretend(int(os.environ["PRETENDED_GPUS"]))

        spec.loader.exec_module = exec_module
        return spec


if os.environ.get("PRETENDED_GPUS"):
    sys.meta_path.insert(0, AfterTorch())
