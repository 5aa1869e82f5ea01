"""Local processes joined in a group: on CPU by gloo, with Megatron on CPU; on GPUs by NCCL, one on each.

    results = launch.run(4, "my_package.train:step", config)      # results[rank]

:mod:`isthmus.launch.processes` starts, watches and ends them.
"""

from isthmus.launch.processes import WorkerError as WorkerError
from isthmus.launch.processes import missing_gpus as missing_gpus
from isthmus.launch.processes import preload as preload
from isthmus.launch.processes import run as run
