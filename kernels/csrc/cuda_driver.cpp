#include "cuda_driver.h"

#include <dlfcn.h>

#include <type_traits>

namespace vmm {
namespace {

// Names under which libcuda exports the functions of the table; _v2 marks the current signature.
bool load(void* library, Driver* driver, const char** missing) {
  auto find = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(library, name));
    if (!function && !*missing) *missing = name;
  };
  find(driver->init, "cuInit");
  find(driver->primary_context, "cuDevicePrimaryCtxRetain");
  find(driver->push_context, "cuCtxPushCurrent_v2");
  find(driver->pop_context, "cuCtxPopCurrent_v2");
  find(driver->synchronize, "cuCtxSynchronize");
  find(driver->memory_info, "cuMemGetInfo_v2");
  find(driver->granularity, "cuMemGetAllocationGranularity");
  find(driver->reserve, "cuMemAddressReserve");
  find(driver->free_address, "cuMemAddressFree");
  find(driver->create, "cuMemCreate");
  find(driver->release, "cuMemRelease");
  find(driver->map, "cuMemMap");
  find(driver->unmap, "cuMemUnmap");
  find(driver->set_access, "cuMemSetAccess");
  find(driver->register_host, "cuMemHostRegister_v2");
  find(driver->unregister_host, "cuMemHostUnregister");
  find(driver->copy_out, "cuMemcpyDtoHAsync_v2");
  find(driver->copy_in, "cuMemcpyHtoDAsync_v2");
  find(driver->create_stream, "cuStreamCreate");
  find(driver->synchronize_stream, "cuStreamSynchronize");
  find(driver->create_event, "cuEventCreate");
  find(driver->destroy_event, "cuEventDestroy_v2");
  find(driver->record_event, "cuEventRecord");
  find(driver->synchronize_event, "cuEventSynchronize");
  return !*missing;
}

}  // namespace

const Driver* system_driver(const char** reason) {
  static Driver driver;
  static const char* why = [] {
    void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!library) return "libcuda.so.1 is not on this machine";
    const char* missing = nullptr;
    if (!load(library, &driver, &missing)) return missing;
    return driver.init(0) == kSuccess ? static_cast<const char*>(nullptr) : "cuInit found no GPU";
  }();
  *reason = why;
  return why ? nullptr : &driver;
}

}  // namespace vmm
