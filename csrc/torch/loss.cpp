// The loss's ops.
#include "torch/checks.h"
