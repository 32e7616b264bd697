"""Memory of a rank, action by action.

    a rank's peak     most over moments of its row of  sum over what is alive of its bytes      ``lifetimes``
    alive             what is born and has not died: the lines of one table                     ``table``
    bytes             of what is there throughout, and of a micro-batch on a stage              ``sizes``
    a message         buffers, frames, and what stays where it was sent                         ``messages``
    a micro-batch     what a stage keeps of it, less what lies in buffers                       ``activations``
    a pass            most over its layers k of  saved (<= k) + level (k) + gradients (>= k)    ``action_peaks``
    level of a layer  affine in the samples between sizes measured; a share of it for a part    ``levels``
    at least          fewer lines of the table, for any two cuts                                ``memory_bound``

Read ``table`` first: whoever changes what is held from when to when changes it there.
"""
