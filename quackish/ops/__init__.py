"""The torch layer: argument checks, custom operators, autograd and modules."""
