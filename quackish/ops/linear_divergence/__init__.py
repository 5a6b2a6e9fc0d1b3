"""A student's divergence from a teacher, from both hidden states and heads.

- api.py: the public function; checks.py: its arguments
- reference.py: the formulas, and the portable path
- problems.py: the kernels' problems, configs and descriptions; kernels/: device code
- kernel_steps.py: the steps of reference.py with kernels
- schedule.py: blocks of rows, and their memory
- operators.py: torch.ops.quackish.linear_divergence_fwd and its gradient
- tools.py, dry_run.py, measure.py, providers.py: for the commands
"""
