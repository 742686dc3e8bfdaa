// The pass that a kernel runs: PARARNN_BACKWARD (0 or 1) says which.
#pragma once

#if PARARNN_BACKWARD
#include "backward.h"
#include "sum.h"
namespace pararnn { using Pass = BackwardPass; }
#else
#include "forward.h"
namespace pararnn { using Pass = ForwardPass; }
#endif
