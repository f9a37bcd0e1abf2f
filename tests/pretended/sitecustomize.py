"""With this folder in PYTHONPATH each Python process that imports torch has as many pretended GPUs
as CUDA_VISIBLE_DEVICES names."""

import importlib.machinery
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

            gpus.pretend()

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, AfterTorch())
