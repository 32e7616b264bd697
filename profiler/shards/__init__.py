"""Parts of layers, measured at their own shapes.

Modules:

    arguments   What an operator is called with to do a part of its layer, on inputs that hold just what the part reads
    measure     Parts of layers, measured at their own shapes; which parts are worth measuring
    missing     Measures what a plan uses and its profile does not hold: the same processes, sizes and parts being given
    network     A part of one layer: its operator, and the pieces of tensors that it is called with
"""
