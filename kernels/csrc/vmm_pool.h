// GPU memory in tagged regions whose physical pages go back to the driver and return at the same addresses.
//
// A region holds any number of blocks. A block is a reserved range of addresses, backed chunk by chunk with physical
// memory; a chunk's copy on the host is pinned when it is first needed and kept. States of a region: resident (every
// chunk mapped) and released (none).
#pragma once

#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "cuda_driver.h"

namespace vmm {

enum class Policy : int {
  kDrop = 0,      // a release forgets the contents
  kCopy = 1,      // every release copies them to the host, every restore copies them back
  kCopyOnce = 2,  // only the first release copies: the contents never change
};

enum class Status : int {
  kOk = 0,
  kOutOfMemory = 1,      // of the device
  kHostOutOfMemory = 2,  // no pages, or pinning them is refused
  kState = 3,            // the call does not fit the state of the region
  kDriver = 4,           // any other error of the driver
};

struct Failure : std::runtime_error {
  Failure(Status status, const std::string& message, size_t wanted = 0, size_t free = 0)
      : std::runtime_error(message), status(status), wanted(wanted), free(free) {}
  Status status;
  size_t wanted, free;  // bytes of the device, for kOutOfMemory
};

struct Moved {
  size_t out = 0, in = 0;  // bytes copied over the bus
};

struct Reserve {
  size_t bytes = 0, taken = 0;         // host memory reserved, and of that in use by regions
  double pinning_s = 0, waited_s = 0;  // what pinning it took, and of that what releases waited for
};

class Pool {
 public:
  // chunk_bytes: unit of mapping, unmapping and copying. Small chunks start the pipeline early, large chunks need
  // fewer driver calls.
  Pool(const Driver& driver, int device, size_t chunk_bytes = size_t{128} << 20);
  ~Pool();
  Pool(const Pool&) = delete;

  // Create a region, or check that an existing one has this policy.
  void open(const std::string& tag, Policy policy);
  // Allocate memory in a resident region and return its address.
  Address allocate(const std::string& tag, size_t bytes);
  // Free a block, resident or released.
  void free(Address address);
  // Release `out`, then restore `in`; either may be empty. With both, the copies run in both directions at once, and
  // `in` never takes more memory than `out` has given back. If the device has no room for `in`, `in` stays released.
  Moved move(const std::string& out, const std::string& in);
  // Mark the host copy as outdated: the next release of a kCopyOnce region copies again.
  void invalidate(const std::string& tag);

  bool resident(const std::string& tag);
  size_t bytes(const std::string& tag);
  // Bytes of all released regions: addresses without physical memory.
  size_t released_bytes();
  // Return the host copy of an address; it is contiguous to the end of the address's block.
  void* host(Address address);

  // Reserve host memory once; first releases use it instead of pinning their own. It can be reserved again after every
  // block in it is freed.
  void reserve_host(size_t bytes);
  // Pin the reserve; call it once after reserve_host, on a separate thread. A release waits until its part is pinned. An
  // error is thrown here and by the first release that needs the failed part; the memory before it stays usable.
  void pin_reserve();
  Reserve reserve();

 private:
  struct Chunk {
    Address address = 0;
    size_t bytes = 0;
    Handle handle = 0;
    char* host = nullptr;
    void* copied = nullptr;  // event: the copy to the host is complete
    bool is_reserved = false;  // its place on the host is in the reserve, which keeps it
  };
  struct Block {
    Address address = 0;
    size_t bytes = 0;
    std::vector<Chunk> chunks;
  };
  struct Region {
    std::string tag;
    Policy policy = Policy::kDrop;
    bool resident = true;
    bool has_copy = false;
    std::map<Address, Block> blocks;
  };
  class Context;

  Region& find(const std::string& tag, const char* action);
  Region& find(const std::string& tag, const char* action, bool resident);
  void check(CUresult result, const char* call, const std::string& tag) const;
  void map(Chunk& chunk, const Region& region, size_t wanted);
  void unmap(Chunk& chunk, const std::string& tag);
  void begin_copy_out(Chunk& chunk, const std::string& tag);
  void discard(Block& block) noexcept;
  void pin(Region& region);
  bool take_reserve(Block& block, const std::string& tag);
  std::string pin_chunks(const std::vector<Chunk*>& chunks, const std::function<void(size_t)>& pinned);
  static std::vector<Chunk*> chunks(Region* region);
  static size_t size(const std::vector<Chunk*>& chunks);

  const Driver& driver_;
  const int device_;
  size_t granularity_ = 0;
  size_t chunk_bytes_;
  AllocationProperties properties_{};
  void* context_ = nullptr;
  void* stream_out_ = nullptr;
  void* stream_in_ = nullptr;
  std::mutex mutex_;
  std::map<std::string, Region> regions_;
  std::map<Address, Region*> owners_;  // of each block

  // One thread pins the reserve in units of chunk_bytes_, another one assigns memory from it.
  std::mutex reserve_mutex_;
  std::condition_variable unit_pinned_;
  std::vector<Chunk> units_;
  std::vector<bool> is_pinned_;
  std::string reserve_problem_;
  Reserve reserve_;
  size_t next_ = 0;  // where in the reserve the next block may begin
};

}  // namespace vmm

// C interface. Functions that return int return a vmm::Status; vmm_error returns its message.
extern "C" {
int vmm_start(int device, size_t chunk_bytes);
int vmm_enter(const char* tag, int policy);  // this thread allocates in the region from now on
void vmm_leave();
void* vmm_malloc(size_t bytes, int device, void* stream);  // the signatures of torch's CUDAPluggableAllocator
void vmm_free(void* address, size_t bytes, int device, void* stream);
int vmm_move(const char* out, const char* in, size_t* bytes_out, size_t* bytes_in);
int vmm_invalidate(const char* tag);
int vmm_resident(const char* tag, int* resident, size_t* bytes);
int vmm_released(size_t* bytes);
int vmm_host(void* address, void** host);
int vmm_reserve_host(size_t bytes);
int vmm_pin_reserve();
int vmm_reserve(size_t* bytes, size_t* taken, double* pinning_s, double* waited_s);
const char* vmm_error(int* status, size_t* wanted, size_t* free);  // of the last call of this thread that failed
}
