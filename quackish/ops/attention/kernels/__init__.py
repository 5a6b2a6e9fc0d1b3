"""The kernels of attention, and the parts of those that compute scores.

forward_sm90.py                o and lse
backward_rows.py               the shift of each row's scores, and delta
backward_keys_sm90.py          dk, dv, and dbias if the bias is not broadcast
backward_queries_sm90.py       dq
backward_product_sm90.py       dq from ds in memory
backward_bias_sm90.py          dbias of a broadcast bias
backward_queries_bias_sm90.py  dq and dbias of a broadcast bias at d 32
small_forward_sm90.py          o and lse for at most 128 queries and keys and d 32, where it is faster
small_backward_sm90.py         dq, dk, dv and dbias for at most 128 queries and keys and d 32
mask_classes.py                which blocks of a mask leave no key, some keys or all keys
tile_order.py                  the order in which tiles start under a mask

base_sm90.py      set-up and warp roles of a kernel that computes scores; its base classes:
  items.py          which tile of which head a CTA has, and which tiles it walks over
  mask_walk.py      the walk over these tiles without those that a mask leaves empty
  own_tiles.py      tiles that a warp group keeps during an item
  loads.py          loads of tiles by TMA
  matmuls.py        WGMMAs of a warp group
  scores.py         scale, softcap, bias, mask, causality and window
  results.py        stores of accumulators
softmax.py        the softmax of both forward kernels
bias_items.py     items of kernels that walk over the heads that share a matrix of the bias
small_sm90.py     the base of the small kernels
cluster_sum.py    sums of accumulators over the CTAs of a cluster
cta.py            what a CTA's threads share
swizzled_tile.py  a tile in shared memory, in the layout of an accumulator
"""
