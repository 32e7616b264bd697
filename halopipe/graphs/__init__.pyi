from cuda_ops.extras.sampling.generated import generated as generated
from cuda_ops.extras.sampling.generated import power_law as power_law
from cuda_ops.extras.sampling.graph import GraphError as GraphError
from cuda_ops.extras.sampling.graph import NodeGraph as NodeGraph
from cuda_ops.extras.sampling.sampler import Block as Block
from cuda_ops.extras.sampling.sampler import NeighbourSampler as NeighbourSampler
from cuda_ops.extras.sampling.sampler import SampledGraph as SampledGraph
from halopipe.extras.sampled_graphs.seeds import seed_batches as seed_batches
