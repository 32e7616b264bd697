from halopipe.data.demo_data import digits as digits
from halopipe.data.demo_data import synthetic as synthetic
from halopipe.extras.point_clouds.solids import held_out_shapes as held_out_shapes
from halopipe.extras.point_clouds.solids import shapes as shapes
from halopipe.extras.sampled_graphs.seeds import graph_seeds as graph_seeds
from halopipe.extras.sampled_graphs.seeds import seed_batches as seed_batches
from halopipe.extras.sampled_graphs.seeds import small_graph_seeds as small_graph_seeds
