"""A process that compiles kernels for another one. It is run as a file, by parallel.py; nobody imports it.

Requests come pickled on stdin, and an answer to each goes to stdout. The launcher is imported without the rest of
quackish: torch takes longer to import than a kernel to compile.
"""

import importlib
import os
import pickle
import sys
import types


def main() -> None:
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what the compiler prints must not get between the answers
    sys.path[:], folder, version = pickle.load(requests)
    sys.modules["torch"] = None  # tvm_ffi would import it
    package = sys.modules["quackish"] = types.ModuleType("quackish")
    package.__path__, package.__version__ = [folder], version
    from quackish.launch.compile import Request, obtain

    while True:
        try:
            module, name, problem, config, target = pickle.load(requests)
        except EOFError:
            return
        try:
            kernel_class = getattr(importlib.import_module(module), name)
            answer = tuple(obtain(Request(kernel_class, problem, config, target))[1:])
        except Exception as error:
            answer = "failed", str(error) or repr(error)
        pickle.dump(answer, answers)
        answers.flush()


if __name__ == "__main__":
    main()
