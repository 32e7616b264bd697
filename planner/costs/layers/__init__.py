"""What a layer costs: as measured, read between measurements, or by a model of its family or device.

    n samples           an exact hit, else a straight line in log-log between two of one
                        back end                                                     ``interpolation.layer_cost``
    a part of it        measured at its shape, else its family's model, else a share   ``shards.MeasuredParts``
    parts to measure    of every grid of ranks that layouts offer                      ``part_shapes.part_shapes``
    a family            t = c0 + c1 flops + c2 bytes + c3 weights, c >= 0              ``regression.fitted``
    flops, bytes        of a layer, or a part of one: what such models are made of     ``features.Features``
    another device      t measured x roof there / roof here                            ``roofline.under_a_roof``
    a stretch a ... b   S(b) - S(a) of running sums                                    ``cost_table.span``
    how well known      the least certain of several; held-back errors                 ``confidence.weakest``

Read ``interpolation`` first: the others answer where it cannot.
"""
