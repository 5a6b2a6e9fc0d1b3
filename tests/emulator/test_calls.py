"""printf in kernels."""

import numpy as np
import pytest

from quackish.emulator import Fault
from quackish.emulator.isa import calls
from tests.emulator.ptx import kernel, launch

HEAD = """.extern .func (.param .b32 result) vprintf (.param .b64 text, .param .b64 arguments);
.global .align 1 .b8 text[32] = {%s};
"""
BODY = """.local .align 8 .b8 arguments_of_thread[16];
.reg .b32 %t; .reg .b64 %a, %f, %x; mov.u32 %t, %tid.x;
mov.b64 %a, arguments_of_thread; st.local.b32 [%a], %t; mov.b64 %x, 0d3FF8000000000000; st.local.b64 [%a+8], %x;
{ .param .b64 first; .param .b64 second; .param .b32 result;
cvta.local.u64 %a, %a; mov.b64 %f, text; cvta.global.u64 %f, %f;
st.param.b64 [first], %f; st.param.b64 [second], %a;
call.uni (result), FUNCTION, (first, second); }"""


def run(text, function="vprintf", block=(2, 1, 1)):
    head = HEAD % ", ".join(map(str, text.encode() + b"\0"))
    launch(kernel(BODY.replace("FUNCTION", function), shared=head), block=block)


def test_printf_of_each_thread(capsys):
    run("thread %d: %5.2f%%\n")
    assert capsys.readouterr().out == "thread 0:  1.50%\nthread 1:  1.50%\n"


def test_another_function_is_refused():
    with pytest.raises(RuntimeError, match="does not support this: a call of malloc"):
        run("", "malloc")


@pytest.mark.parametrize(
    "text, values, expected",
    [
        ("%d %d", [("i4", -3), ("i4", 7)], "-3 7"),
        ("%u %x", [("i4", -1), ("u4", 255)], "4294967295 ff"),
        ("%d %lld", [("i4", 1), ("i4", 0), ("i8", -(2**40))], "1 -1099511627776"),
        ("%c%s", [("i4", 65), ("i4", 0), ("u8", 99)], "Atext at 99"),
        ("%p %e", [("u8", 4096), ("f8", 0.5)], "0x1000 5.000000e-01"),
    ],
)
def test_formats(text, values, expected):
    memory = b"".join(np.array([value], kind).tobytes() for kind, value in values)
    assert calls._formatted(text, np.frombuffer(memory, np.uint8), "text at {}".format) == expected


def test_local_memory_outside_of_its_bounds():
    body = ".local .align 4 .b8 array[8]; .reg .b64 %a; mov.b64 %a, array; st.local.b32 [%a+{}], 0;"
    launch(kernel(body.format(4)))
    with pytest.raises(Fault, match="a thread has 8 bytes"):
        launch(kernel(body.format(8)))
    with pytest.raises(Fault, match="misaligned access of 4 bytes of local memory"):
        launch(kernel(body.format(2)))
