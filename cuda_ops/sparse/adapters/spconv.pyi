from cuda_ops.extras.adapters.spconv import AxisOrder as AxisOrder
from cuda_ops.extras.adapters.spconv import from_spconv as from_spconv
from cuda_ops.extras.adapters.spconv import load_spconv_state_dict as load_spconv_state_dict
from cuda_ops.extras.adapters.spconv import to_spconv as to_spconv
from cuda_ops.extras.adapters.spconv import to_spconv_state_dict as to_spconv_state_dict
