"""Weight rules: pure data and arithmetic on names and row numbers. No torch.distributed, no megatron."""

from isthmus.weights.map import Bound as Bound
from isthmus.weights.map import Coverage as Coverage
from isthmus.weights.map import HFTensor as HFTensor
from isthmus.weights.map import WeightMap as WeightMap
from isthmus.weights.map import ignore as ignore
from isthmus.weights.map import passthrough as passthrough
from isthmus.weights.names import collapse as collapse
from isthmus.weights.parts import Parts as Parts
from isthmus.weights.parts import per as per
from isthmus.weights.rule import Rule as Rule
from isthmus.weights.rule import Run as Run
from isthmus.weights.rule import column as column
from isthmus.weights.rule import fuse as fuse
from isthmus.weights.rule import hosted as hosted
from isthmus.weights.rule import row as row
from isthmus.weights.rule import same as same
from isthmus.weights.rule import scope as scope
from isthmus.weights.rule import stacked_swiglu as stacked_swiglu
from isthmus.weights.rule import swiglu as swiglu
from isthmus.weights.rule import vocabulary as vocabulary
