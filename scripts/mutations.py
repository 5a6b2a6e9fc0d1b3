"""Mutation tests: one-line mistakes in kernels and host code, each of which must fail a test.

    python scripts/mutations.py --jobs 2                  # all of them
    python scripts/mutations.py --only lce_rows_without_wait

Each mutation is applied to its own copy of the tree, with its own kernel cache. Its tests run there until the first
failure; they must pass without the mutation. A run that exceeds --timeout counts as killed, because a mistake in a
kernel may deadlock. No GPU is needed: tests of kernels run them in the emulator.

The exit status is 0 if every mutation was killed, else 1.
"""

import argparse
import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from quackish.cli.parser import positive

ROOT = Path(__file__).resolve().parents[1]


class Mutation(NamedTuple):
    name: str
    file: str
    old: str  # occurs exactly once in the file
    new: str
    tests: str  # arguments of pytest


MUTATIONS = (
    # GEMM
    Mutation(
        "gemm_stage_never_released",
        "quackish/kernels/gemm/wgmma.py",
        "has been read\n            loaded.consumer_release(released)\n",
        "has been read\n",
        "tests/emulator/test_mistakes.py -k test_the_right_kernel_has_no_fault",
    ),
    Mutation(
        "split_k_tail_wrong_item",
        "quackish/kernels/gemm/split_k_tail.py",
        "tile = plan.first_split * clusters + q % plan.tail",
        "tile = plan.first_split * clusters + q // plan.splits",
        "tests/emulator/test_emulate_details.py -k test_tail_tiles_are_split_along_k",
    ),
    Mutation(
        "split_k_tail_tickets_not_reset",
        "quackish/kernels/gemm/split_k_tail.py",
        "limit = Uint32(splits - 1)",
        "limit = Uint32(splits)",
        "tests/emulator/test_emulate_details.py -k test_tail_tiles_are_split_along_k",
    ),
    Mutation(
        "softmax_flag_of_other_rows",
        "quackish/ops/linear_cross_entropy/kernels/softmax_rows.py",
        "cutlass.min(1 + tm * per_cluster + i, last)",
        "cutlass.min(tm * per_cluster + i, last)",
        "tests/emulator/test_emulate_details.py -k test_a_row_far_above_its_target_is_recomputed",
    ),
    Mutation(
        "rounding_tie_to_the_other_side",
        "quackish/ops/linear_cross_entropy/kernels/epilogue_residual.py",
        "if (bits & 0x1FFFF) == 0x8000:",
        "if (bits & 0x1FFFF) == 0x18000:",
        "tests/emulator/test_emulate_details.py -k test_rounding_residual_of_ties",
    ),
    # linear cross entropy, around the GEMMs
    Mutation(
        "lce_rows_without_wait",
        "quackish/ops/linear_cross_entropy/kernels/rows.py",
        "after_previous()",
        "cute.arch.griddepcontrol_launch_dependents()",
        "tests/emulator/test_emulate_details.py -k test_each_launch_waits_for_the_one_before",
    ),
    Mutation(
        "lce_gather_without_wait",
        "quackish/ops/linear_cross_entropy/kernels/gather.py",
        "after_previous()",
        "cute.arch.griddepcontrol_launch_dependents()",
        "tests/emulator/test_emulate_details.py -k test_each_launch_waits_for_the_one_before",
    ),
    Mutation(
        "lce_compact_divides_by_no_class",
        "quackish/ops/linear_cross_entropy/kernels/compact.py",
        "if counted > 0:",
        "if live > 0:",
        "tests/emulator/test_emulate_details.py -k test_compact_and_sort_write_what_their_stand_ins_write",
    ),
    Mutation(
        "lce_sort_ties_reversed",
        "quackish/ops/linear_cross_entropy/kernels/sort.py",
        "(other == t and k < lane)",
        "(other == t and k > lane)",
        "tests/emulator/test_emulate_details.py -k test_compact_and_sort_write_what_their_stand_ins_write",
    ),
    Mutation(
        "lce_sort_any_slot_of_a_class",
        "quackish/ops/linear_cross_entropy/kernels/sort.py",
        "cute.arch.atomic_min(args.first_slot_of_class + t, slot)",
        "store_at(args.first_slot_of_class, t, slot)",
        "tests/emulator/test_emulate_details.py -k test_compact_and_sort_write_what_their_stand_ins_write",
    ),
    # RMSNorm's kernels
    Mutation(
        "rms_norm_of_a_sum_not_rounded",
        "quackish/ops/rms_norm/kernels/forward.py",
        "(rX.load() + rR.load()).to(res.dtype).to(Float32)",
        "rX.load() + rR.load()",
        "tests/emulator/test_emulate_details.py -k test_y_is_the_norm_of_the_rounded_sum",
    ),
    Mutation(
        "rms_norm_backward_leaves_out_the_last_round",
        "quackish/ops/rms_norm/kernels/backward.py",
        "(num_tiles - worker + num_workers - 1) // num_workers",
        "num_tiles // num_workers",
        "tests/emulator/test_emulate_details.py -k test_gradients_of_all_rows_and_columns",
    ),
    Mutation(
        "column_sum_leaves_out_the_last_slice",
        "quackish/ops/rms_norm/kernels/column_sum.py",
        "const_expr(-(-self.width // (4 * lanes)))",
        "const_expr(self.width // (4 * lanes))",
        "tests/emulator/test_emulate_details.py -k test_gradients_of_all_rows_and_columns",
    ),
    # grouped GEMMs
    Mutation(
        "residual_of_rows_past_the_group",
        "quackish/ops/mlp/kernels/epilogue_grouped.py",
        "row = cutlass.min(block.row0 + thread_rows(block.thread) + 8 * r, block.live - 1)",
        "row = block.row0 + thread_rows(block.thread) + 8 * r",
        "tests/mlp/test_grouped_mlp.py -k 'test_a_residual and kernels'",
    ),
    Mutation(
        "residual_wins_over_the_fill",
        "quackish/ops/mlp/kernels/epilogue_grouped.py",
        "            self.fill(acc, values, block.group)\n            self.output(acc, j, out, block)",
        "            self.output(acc, j, out, block)",
        "tests/mlp/test_grouped_mlp.py -k 'test_a_residual and kernels'",
    ),
    Mutation(
        "gelu_without_its_left_tail",
        "quackish/ops/mlp/kernels/activations.py",
        "cute.arch.fmax(sign, 0.0)",
        "cute.arch.fmax(sign, 1.0)",
        "tests/mlp/test_activations.py -k test_gelu_of_every_number",
    ),
    # host code
    Mutation(
        "no_version_bump_of_grad_weight_out",
        "quackish/ops/linear_cross_entropy/launches.py",
        "torch.autograd.graph.increment_version(out)",
        "pass",
        "tests/linear_cross_entropy/test_schedules.py -k autograd_detects_writes_to_grad_weight_out",
    ),
    Mutation(
        "plan_key_without_the_buffers_dtype",
        "quackish/ops/linear_cross_entropy/api.py",
        "(t.shape, t.dtype, t.device, t.requires_grad)",
        "(t.shape, t.device, t.requires_grad)",
        "tests/linear_cross_entropy/test_errors.py -k plan_is_not_reused_for_other_dtypes",
    ),
    Mutation(
        "saved_exponentials_of_a_retained_graph_written",
        "quackish/ops/linear_cross_entropy/schedules.py",
        "if is_graph_kept():",
        "if False:",
        "tests/linear_cross_entropy/test_schedules.py -k 'modifies_no_saved_tensor and stored'",
    ),
    Mutation(
        "retained_graph_hands_out_gradients_again",
        "quackish/ops/linear_cross_entropy/operators.py",
        'ctx.__dict__.pop("computed", _NOTHING)',
        'ctx.__dict__.get("computed", _NOTHING)',
        "tests/linear_cross_entropy/test_autograd.py "
        "-k 'two_backwards and bias and chunked and mean and False and kernels'",
    ),
    Mutation(
        "gradients_of_two_dtypes_scaled_as_one",
        "quackish/ops/linear_cross_entropy/schedules.py",
        "pair = tensors and tensors[0].dtype == first.dtype",
        "pair = tensors",
        "tests/linear_cross_entropy/test_schedules.py -k test_gradients_of_two_dtypes_are_scaled",
    ),
    # MLPs
    Mutation(
        "preactivation_of_a_retained_graph_overwritten",
        "quackish/ops/mlp/operators.py",
        "ctx.is_overwritten = overwrite = not (is_captured or is_graph_kept())",
        "overwrite = True",
        "tests/mlp/test_dense.py -k 'second_backward and False'",
    ),
    Mutation(
        "mlp_residual_of_another_row",
        "quackish/ops/mlp/kernels/epilogue_grouped.py",
        "vector_at(bases[i % 2], col, 2)",
        "vector_at(bases[0], col, 2)",
        "tests/mlp/test_dense.py -k test_emulated",
    ),
    # linear_divergence
    Mutation(
        "divergence_of_classes_past_the_last",
        "quackish/ops/linear_divergence/kernels/rows.py",
        "rU[k, v] = -Float32.inf",
        "rU[k, v] = Float32(0.0)",
        "tests/linear_divergence/test_linear_divergence.py -k test_kernels_in_the_emulator",
    ),
    Mutation(
        "divergence_gradients_of_rows_that_do_not_count",
        "quackish/ops/linear_divergence/kernels/rows.py",
        "if args.start + row < load_at(args.num_live, 0):",
        "if args.start + row < 0x7FFFFFFF:",
        "tests/linear_divergence/test_linear_divergence.py -k test_kernels_in_the_emulator",
    ),
    Mutation(
        "divergence_sums_of_another_cta",
        "quackish/ops/linear_divergence/kernels/rows.py",
        "cute.arch.store_async_dsmem(slot, values[i].bitcast(Int32), mbar, lane)",
        "cute.arch.store_async_dsmem(slot, values[0].bitcast(Int32), mbar, lane)",
        "tests/linear_divergence/test_linear_divergence.py -k test_a_row_over_a_cluster",
    ),
    Mutation(
        "divergence_dw_of_the_last_block",
        "quackish/ops/linear_divergence/schedule.py",
        "factor, dw, start > 0)",
        "factor, dw, False)",
        "tests/linear_divergence/test_linear_divergence.py -k test_blocks_and_chunks",
    ),
    # attention
    Mutation(
        "attention_delta_of_half_a_row",
        "quackish/ops/attention/kernels/backward_rows.py",
        "if offset < lanes else",
        "if offset < 4 else",
        "tests/attention/test_kernels.py -k test_bias_and_mask_emulated",
    ),
    Mutation(
        "attention_sums_not_rescaled_to_a_new_maximum",
        "quackish/ops/attention/kernels/softmax.py",
        "total[r] = total[r] * rescale[r] + added",
        "total[r] = total[r] + added",
        "tests/attention/test_kernels.py -k 'test_clusters_emulated and all'",
    ),
    Mutation(
        "attention_large_lse_without_its_residual",
        "quackish/ops/attention/kernels/backward_rows.py",
        "(pair + 1).store(residual * LOG2_E)",
        "(pair + 1).store(Float32(0.0))",
        "tests/attention/test_kernels.py -k 'test_large_biases and not small'",
    ),
    Mutation(
        "attention_partly_masked_tile_is_full",
        "quackish/ops/attention/kernels/mask_walk.py",
        "return most != EMPTY, least == FULL",
        "return most != EMPTY, least != EMPTY",
        "tests/attention/test_kernels.py -k test_bias_and_mask_emulated",
    ),
    Mutation(
        "attention_keys_of_the_first_tile_in_all",
        "quackish/ops/attention/kernels/mask_walk.py",
        "self.keep(args.scores, head, k0 + (32 * j + cute.arch.lane_idx()))",
        "self.keep(args.scores, head, 32 * j + cute.arch.lane_idx())",
        "tests/attention/test_kernels.py -k 'test_bias_of_all_batches_emulated and keys and not wide'",
    ),
    Mutation(
        "attention_dq_of_left_out_heads_not_written",
        "quackish/ops/attention/kernels/backward_queries_bias_sm90.py",
        "(n % self.cluster == rank)",
        "(n % self.cluster == self.cluster)",
        "tests/attention/test_kernels.py -k 'test_clusters_emulated and padded'",
    ),
    Mutation(
        "attention_dq_of_the_step_after",
        "quackish/ops/attention/kernels/backward_queries_bias_sm90.py",
        "before, two_before = n, before",
        "before, two_before = n, n",
        "tests/attention/test_kernels.py -k 'test_clusters_emulated and all'",
    ),
    Mutation(
        "attention_cluster_sum_without_its_first_cta",
        "quackish/ops/attention/kernels/cluster_sum.py",
        "acc[i] = sums.received[tid, i, 0]",
        "acc[i] = Float32(0.0)",
        "tests/attention/test_kernels.py -k 'test_clusters_emulated and all'",
    ),
    Mutation(
        "attention_parts_leave_out_a_head",
        "quackish/ops/attention/kernels/bias_items.py",
        "last=cutlass.min(first + per_part, summed)",
        "last=cutlass.min(first + per_part, summed - 1)",
        "tests/attention/test_kernels.py -k 'test_small_emulated and parts'",
    ),
    Mutation(
        "attention_small_ds_before_its_mask",
        "quackish/ops/attention/kernels/small_backward_sm90.py",
        "                    self.zero_rows(x, kept)\n",
        "",
        "tests/attention/test_kernels.py -k 'test_small_emulated and keys and not two'",
    ),
    # rotary
    Mutation(
        "rotary_gradient_with_the_other_sine",
        "quackish/ops/rotary/kernels/rotary.py",
        "y0 = cute.math.fma(x0, c0, x1 * s1)",
        "y0 = cute.math.fma(x0, c0, x1 * s0)",
        "tests/rotary/test_rotary.py -k 'test_emulated and halves'",
    ),
    Mutation(
        "streams_share_a_workspace",
        "quackish/device/workspace.py",
        "_take_for_stream((device_index, stream), scratch_floats)",
        "_take_for_stream((device_index, 0), scratch_floats)",
        "tests/device/test_workspace.py -k each_stream_has_its_own_workspace",
    ),
    Mutation(
        "launches_on_the_default_stream",
        "quackish/device/kernel_device.py",
        "functools.partial(cuda.stream_of, device.index)",
        "int",
        "tests/device/test_device.py -k a_gpu",
    ),
)


def apply(mutation: Mutation, root: Path) -> str:
    """The text of the mutated file."""
    text = (root / mutation.file).read_text(encoding="utf-8")
    if (count := text.count(mutation.old)) != 1:
        raise ValueError(
            f"mutation {mutation.name}: {mutation.old!r} occurs {count} times in {mutation.file}, expected once; "
            "update scripts/mutations.py"
        )
    return text.replace(mutation.old, mutation.new)


# Running tests -------------------------------------------------------------------------------------------------------


class NotRun(Exception):
    """The tests cannot judge a mutation. The message says why."""


_running: set[subprocess.Popen] = set()


def first_failure(root: Path, files: Path, name: str, tests: str, timeout: float, jobs: int) -> str:
    """Runs the selected tests in `root`. Returns the first failing test, a timeout or a crash; "" if all pass.

    The kernel cache and the log go to `files`. Raises NotRun if no test passed or failed.
    """
    log = files / f"{name}.log"
    options = ["-x", "-q", "-rfEs", "--exhaustive", "all", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options, *shlex.split(tests)]
    path = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
    env = {"QUACKISH_COMPILE_JOBS": str(max(1, (os.cpu_count() or 1) // jobs))} | os.environ
    env |= {"PYTHONPATH": path, "QUACKISH_CACHE_DIR": str(files / "cache"), "PYTHONDONTWRITEBYTECODE": "1"}
    with log.open("wb") as out:
        # its own process group, so that processes started by tests are killed too
        process = subprocess.Popen(command, cwd=root, env=env, stdout=out, stderr=out, start_new_session=True)
    _running.add(process)
    try:
        code = process.wait(timeout)
    except subprocess.TimeoutExpired:
        return f"timeout after {timeout:.0f} s"
    finally:
        kill(process)
        _running.discard(process)
    if code < 0:
        return f"crash with signal {-code}"
    text = log.read_text(errors="replace")
    if "does not compile for" in text:
        raise NotRun("the mutated kernel does not compile")
    if code == 1 and (failed := re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", text, re.MULTILINE)):
        return failed[1]
    if code == 0 and re.search(r"\d passed", text):
        return ""
    skipped = re.search(r"^SKIPPED .*", text, re.MULTILINE)
    last = skipped[0] if skipped else text.strip().rpartition("\n")[2]
    raise NotRun(f"pytest {tests} ended with exit code {code}: {last}")


def kill(process: subprocess.Popen) -> None:
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def copy_tree(root: Path, to: Path) -> None:
    for name in ("quackish", "tests"):
        shutil.copytree(root / name, to / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy2(root / "pyproject.toml", to)


def failure_of(mutation: Mutation, root: Path, folder: Path, timeout: float, jobs: int) -> str:
    """The first test that fails with the mutation; "" if all pass. Raises NotRun."""
    files, tree = folder / mutation.name, folder / mutation.name / "tree"
    copy_tree(root, tree)
    (tree / mutation.file).write_text(apply(mutation, root), encoding="utf-8")
    with contextlib.suppress(FileNotFoundError):  # usable if no kernel is mutated: file names contain a source hash
        shutil.copytree(folder / "unmutated" / "cache", files / "cache")
    try:
        return first_failure(tree, files, "tests", mutation.tests, timeout, jobs)
    finally:
        shutil.rmtree(files)


def run(mutations: Sequence[Mutation], root: Path, timeout: float, jobs: int) -> int:
    """Prints a verdict for each mutation. Returns how many were killed."""
    for mutation in mutations:
        apply(mutation, root)
    with tempfile.TemporaryDirectory(prefix="quackish-mutations-") as name, ThreadPoolExecutor(jobs) as pool:
        folder, files = Path(name), Path(name) / "unmutated"
        copy_tree(root, files / "tree")
        selections = list(dict.fromkeys(m.tests for m in mutations))
        print(f"running {len(selections)} selections of tests without mutations", flush=True)

        def why_not(i: int) -> str:
            """Why selection `i` cannot judge mutations; "" if it can."""
            try:
                # allows more time: this compiles the kernels for all mutations of host code
                failure = first_failure(files / "tree", files, str(i), selections[i], 3 * timeout, jobs)
            except NotRun as reason:
                return str(reason)
            return failure and f"without the mutation: {failure}"

        def is_killed(mutation: Mutation) -> bool:
            started, failure = time.monotonic(), ""
            try:
                if reason := reasons[mutation.tests]:
                    raise NotRun(reason)
                failure = failure_of(mutation, root, folder, timeout, jobs)
                verdict = f"killed by {failure}" if failure else "SURVIVED"
            except NotRun as reason:
                verdict = f"not run: {reason}"
            print(f"{mutation.name}: {verdict} ({time.monotonic() - started:.0f} s)", flush=True)
            return bool(failure)

        try:
            reasons = dict(zip(selections, pool.map(why_not, range(len(selections))), strict=True))
            return sum(pool.map(is_killed, mutations))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in list(_running):
                kill(process)
            raise


# The command ---------------------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None, mutations: Sequence[Mutation] = MUTATIONS, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    names = [m.name for m in mutations]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME", help="only these mutations")
    default = max(1, (os.cpu_count() or 1) // 4)
    parser.add_argument("--jobs", type=positive, default=default, help="parallel mutations; default: %(default)s")
    parser.add_argument("--timeout", type=positive, default=90, help="seconds per mutation; default: %(default)s")
    args = parser.parse_args(argv)
    started, chosen = time.monotonic(), [m for m in mutations if m.name in args.only]
    killed = run(chosen, root, args.timeout, args.jobs)
    print(f"{killed} of {len(chosen)} killed, in {time.monotonic() - started:.0f} s")
    return 0 if killed == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
