#include "bare.h"
