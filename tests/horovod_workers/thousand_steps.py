"""A thousand steps of BasisAdam and OneBitAdam: are the ranks equal to the bit?"""

from horovod_pairs import pair
from horovod_rank import check

from tf_basis import distributed


@check
def basis_with_onebit_adam():
    return pair(1000)


@check
def literal_policy():
    return pair(300, policy=[distributed.NORMALIZATION_EVERY_10])
