from profiler.extras.sampled_graphs.networks import NODES as NODES
from profiler.extras.sampled_graphs.networks import SMALL as SMALL
from profiler.extras.sampled_graphs.networks import GATConv as GATConv
from profiler.extras.sampled_graphs.networks import SAGEConv as SAGEConv
from profiler.extras.sampled_graphs.networks import SampledNetwork as SampledNetwork
from profiler.extras.sampled_graphs.networks import gat as gat
from profiler.extras.sampled_graphs.networks import sage as sage
