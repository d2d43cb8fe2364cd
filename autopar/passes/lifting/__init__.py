"""Rewrites blocks into row space: the engine under `lift_rows`.

- `scope`: a block being rewritten: values in their dense form and at the touched rows of a family;
- `equations`: single equations, scans, remats and conds, whose bodies get scopes of their own, and the same block again
  for untouched rows (`UntouchedScope`).
"""
