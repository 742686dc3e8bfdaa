// The pass of a kernel: PARARNN_BACKWARD (0 or 1) selects it.
#pragma once

#if PARARNN_BACKWARD
#include "backward.h"
#include "../sum.h"
namespace pararnn { using Pass = BackwardPass; }
#else
#include "forward.h"
namespace pararnn { using Pass = ForwardPass; }
#endif
