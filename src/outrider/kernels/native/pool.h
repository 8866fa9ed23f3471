// One pool of sleeping worker threads per process.
#pragma once
#include "team.h"

namespace outrider {

using Region = void (*)(void* argument, Team& team);

// Runs `region` on `threads` threads, the caller being thread 0; returns when all are done.
// Calls from several threads take turns. Falls back to fewer threads when none can be started.
void run_region(int threads, Region region, void* argument);

// Pin worker i to the i-th processor this process may use (new workers only).
void pin_workers(bool on);

}  // namespace outrider
