// The part of the CUDA driver that the pool uses, declared here so that it compiles without a CUDA toolkit.
// Layouts and values equal cuda.h and are stable from CUDA 11 on.
#pragma once

#include <cstddef>
#include <cstdint>

namespace vmm {

using CUresult = int;
constexpr CUresult kSuccess = 0;
constexpr CUresult kDriverOutOfMemory = 2;

using Address = unsigned long long;  // CUdeviceptr
using Handle = unsigned long long;   // CUmemGenericAllocationHandle

struct Location {
  int type;  // 1: a device
  int id;
};

struct AllocationProperties {
  int type;          // 1: pinned to its location, the only kind there is
  int handle_types;  // 0: not shared with other processes
  Location location;
  void* win32;
  struct {
    unsigned char compression;
    unsigned char rdma;
    unsigned short usage;
    unsigned char reserved[4];
  } flags;
};

struct Access {
  Location location;
  int flags;  // 3: read and write
};

// A table of functions, which a test can replace. Every function returns a CUresult.
struct Driver {
  CUresult (*init)(unsigned flags);
  CUresult (*primary_context)(void** context, int device);
  CUresult (*push_context)(void* context);
  CUresult (*pop_context)(void** context);
  CUresult (*synchronize)();
  CUresult (*memory_info)(size_t* free, size_t* total);
  CUresult (*granularity)(size_t* bytes, const AllocationProperties*, int option);
  CUresult (*reserve)(Address*, size_t bytes, size_t alignment, Address wish, unsigned long long flags);
  CUresult (*free_address)(Address, size_t bytes);
  CUresult (*create)(Handle*, size_t bytes, const AllocationProperties*, unsigned long long flags);
  CUresult (*release)(Handle);
  CUresult (*map)(Address, size_t bytes, size_t offset, Handle, unsigned long long flags);
  CUresult (*unmap)(Address, size_t bytes);
  CUresult (*set_access)(Address, size_t bytes, const Access*, size_t count);
  CUresult (*register_host)(void*, size_t bytes, unsigned flags);
  CUresult (*unregister_host)(void*);
  CUresult (*copy_out)(void* host, Address, size_t bytes, void* stream);
  CUresult (*copy_in)(Address, const void* host, size_t bytes, void* stream);
  CUresult (*create_stream)(void** stream, unsigned flags);
  CUresult (*synchronize_stream)(void* stream);
  CUresult (*create_event)(void** event, unsigned flags);
  CUresult (*destroy_event)(void* event);
  CUresult (*record_event)(void* event, void* stream);
  CUresult (*synchronize_event)(void* event);
};

// Return the driver of this machine, or null and the reason why there is none.
const Driver* system_driver(const char** reason);

}  // namespace vmm
