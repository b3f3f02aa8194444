// A CUDA driver in host memory, for tests: addresses without physical memory fault, copies run when something waits for
// them, the device has a capacity, and a test can make any call fail.
#pragma once

#include <string>
#include <vector>

#include "cuda_driver.h"

namespace fake {

const vmm::Driver& driver();
void reset(size_t capacity);
size_t used();                                        // bytes of physical memory
size_t pinned();                                      // bytes of registered host memory
void fail(const std::string& call, int after, int code);  // the call after so many good ones, once
void hold_pinning(bool is_held);                         // whoever pins waits until it is let go
std::vector<std::string> take_log();                  // copies as they happen, maps, unmaps, waiting for all

}  // namespace fake

extern "C" {
void fake_reset(size_t capacity);
size_t fake_used();
void fake_fail(const char* call, int after, int code);
void fake_hold_pinning(int is_held);
}
