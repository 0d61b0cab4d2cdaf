"""Small tasks that hold the contract of the training room, one file each, and their tests.

None of them is supervised in the way of the papers' tasks: text with a state that goes on, ragged
examples, a curriculum, a policy that makes its own data, rows that the host reads, a frozen
encoder.
"""
