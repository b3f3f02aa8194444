// One pool per process, since torch's allocator functions carry no pointer to one.
#include <memory>
#include <string>

#include "vmm_pool.h"

using vmm::Failure;
using vmm::Status;

namespace {

std::unique_ptr<vmm::Pool>& held() {
  static auto* pool = new std::unique_ptr<vmm::Pool>;  // never freed: torch frees its blocks after static destructors
  return *pool;
}

vmm::Pool& pool() {
  if (!held()) throw Failure(Status::kState, "the pool was not started");
  return *held();
}

thread_local std::string current_tag;
thread_local std::string message;
thread_local Status last;
thread_local size_t wanted_bytes, free_bytes;

template <typename Call>
int guarded(Call call) {
  try {
    call();
    return static_cast<int>(Status::kOk);
  } catch (const Failure& failure) {
    message = failure.what();
    wanted_bytes = failure.wanted;
    free_bytes = failure.free;
    last = failure.status;
  } catch (const std::exception& error) {
    message = error.what();
    last = Status::kDriver;
  }
  return static_cast<int>(last);
}

}  // namespace

extern "C" {

int vmm_start(int device, size_t chunk_bytes) {
  return guarded([&] {
    const char* reason = nullptr;
    const vmm::Driver* driver = vmm::system_driver(&reason);
    if (!driver) throw Failure(Status::kDriver, std::string("no CUDA driver: ") + reason);
    if (held()) throw Failure(Status::kState, "the pool of this process was started before");
    held() = std::make_unique<vmm::Pool>(*driver, device, chunk_bytes);
  });
}

int vmm_enter(const char* tag, int policy) {
  return guarded([&] {
    pool().open(tag, static_cast<vmm::Policy>(policy));
    current_tag = tag;
  });
}

void vmm_leave() { current_tag.clear(); }

void* vmm_malloc(size_t bytes, int, void*) {
  vmm::Address address = 0;
  guarded([&] {
    if (current_tag.empty()) throw Failure(Status::kState, "allocate: this thread is in no region");
    address = pool().allocate(current_tag, bytes);
  });
  return reinterpret_cast<void*>(address);  // null is out of memory to torch
}

void vmm_free(void* address, size_t, int, void*) {
  guarded([&] { pool().free(reinterpret_cast<vmm::Address>(address)); });
}

int vmm_move(const char* out, const char* in, size_t* bytes_out, size_t* bytes_in) {
  return guarded([&] {
    const vmm::Moved moved = pool().move(out, in);
    *bytes_out = moved.out;
    *bytes_in = moved.in;
  });
}

int vmm_invalidate(const char* tag) {
  return guarded([&] { pool().invalidate(tag); });
}

int vmm_resident(const char* tag, int* resident, size_t* bytes) {
  return guarded([&] {
    *resident = pool().resident(tag);
    *bytes = pool().bytes(tag);
  });
}

int vmm_released(size_t* bytes) {
  return guarded([&] { *bytes = pool().released_bytes(); });
}

int vmm_host(void* address, void** host) {
  return guarded([&] { *host = pool().host(reinterpret_cast<vmm::Address>(address)); });
}

int vmm_reserve_host(size_t bytes) {
  return guarded([&] { pool().reserve_host(bytes); });
}

int vmm_pin_reserve() {
  return guarded([&] { pool().pin_reserve(); });
}

int vmm_reserve(size_t* bytes, size_t* taken, double* pinning_s, double* waited_s) {
  return guarded([&] {
    const vmm::Reserve reserve = pool().reserve();
    *bytes = reserve.bytes;
    *taken = reserve.taken;
    *pinning_s = reserve.pinning_s;
    *waited_s = reserve.waited_s;
  });
}

const char* vmm_error(int* status, size_t* wanted, size_t* free) {
  *status = static_cast<int>(last);
  *wanted = wanted_bytes;
  *free = free_bytes;
  return message.c_str();
}
}
