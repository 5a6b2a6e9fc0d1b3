"""Main program of a compiling process. compile_jobs.py runs it as a file; nothing imports it.

Reads pickled requests from stdin and writes an answer to each to stdout. It does not import torch,
which takes longer than compiling a kernel.
"""

import json
import os
import pickle
import sys
import types
from typing import Any


def main() -> None:
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # the compiler prints to stderr: stdout carries the answers
    sys.path[:], folder = json.loads(sys.argv[1])
    sys.modules["torch"] = None  # tvm_ffi would import it
    package: Any = types.ModuleType("quackish")
    sys.modules["quackish"] = package
    package.__path__ = [folder]
    from quackish.device.compile import obtain

    while True:
        try:
            request = pickle.load(requests)
        except EOFError:
            return
        try:
            answer = tuple(obtain(request)[1:])
        except Exception as error:
            answer = "failed", str(error) or repr(error)
        pickle.dump(answer, answers)
        answers.flush()


if __name__ == "__main__":
    main()
