@0xd4a9f1c35b7e8206;
# The header in front of each run of tensor bytes. The bytes themselves follow it raw, so that they can be received
# straight into the destination array.

struct TensorHeader {
  message @0 :UInt64;
  # Id of the control message that declared the tensor.
  tensor @1 :UInt32;
  # Position of the tensor in that declaration.
  offset @2 :UInt64;
  # First byte of this run within the tensor. Runs of one tensor come in order and without gaps.
}
