// Devices for tests, called `sim` in torch: memory of the CPU, with a limit, counted copies, and a clock of their own.
//
// Kernels run on the CPU at once, in the order in which they are called. What they and copies would take on a device is
// kept in a simulated clock: each stream has a time, copies and kernels move it on, events and synchronisation join
// times. So whether a copy overlaps with compute is a number, and code that reads what has not arrived, writes what is
// still read, or frees what another stream uses is found without a race having to happen.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

namespace {

constexpr int kMaxDevices = 8;
constexpr auto kSim = c10::DeviceType::PrivateUse1;
enum Direction { kToDevice, kToHost, kBetween, kDirections };

using StreamKey = std::pair<int, c10::StreamId>;

// What is known of an allocation: where it is, and until when it is written and read in simulated time.
struct Allocation {
  void* memory;
  size_t bytes;
  int device;
  StreamKey home;             // the stream that was current when it was made
  double written = 0;         // when the last write to it ends, and on which stream
  StreamKey writer{-1, 0};
  std::map<StreamKey, double> reads;
  std::set<StreamKey> recorded;
};

// Memory that was freed while another stream used it. The next work of its home stream may be given it.
struct Freed {
  double until;
  std::string what;
};

// Blocks of a device's memory: how many there are, the most, all that were ever given out, and refused requests.
struct Blocks {
  int64_t now = 0, most = 0, ever = 0, bytes_ever = 0, refused = 0;
};

struct State {
  std::recursive_mutex mutex;
  int devices = 1;
  std::array<Blocks, kMaxDevices> blocks{};
  std::array<int64_t, kMaxDevices> used{}, peak{}, cap{};
  std::array<int64_t, kDirections> copies{}, copied{};
  std::array<double, kDirections> copy_rate{};  // bytes a second; 0 takes no time
  double kernel_rate = 0;
  double host = 0, origin = 0;
  std::map<StreamKey, double> streams;
  std::array<c10::StreamId, kMaxDevices> made{};
  std::vector<std::string> hazards;
  std::map<StreamKey, std::vector<Freed>> freed;
  int64_t kernels = 0;
  void (*synchronised)(const char*) = nullptr;  // called without the lock: it takes Python's
  std::map<const char*, size_t> pinned;
};

State& state() {
  static State* kept = new State;  // tensors outlive static objects
  return *kept;
}

using Lock = std::lock_guard<std::recursive_mutex>;

thread_local int current_device = 0;
thread_local std::array<c10::StreamId, kMaxDevices> current_stream{};
thread_local int inside_kernel = 0;  // copies of a kernel's own arguments are none of the program's

// The host waits for the device here. What is reported is the program's own, not what a kernel does on the CPU.
void report(const char* what) {
  if (!inside_kernel && state().synchronised) state().synchronised(what);
}

StreamKey stream_of(int device) { return {device, current_stream[device]}; }

std::string shown(StreamKey stream) {
  return "stream " + std::to_string(stream.second) + " of sim:" + std::to_string(stream.first);
}

// Memory

void release(void* context) {
  auto* allocation = static_cast<Allocation*>(context);
  {
    Lock lock(state().mutex);
    state().used[allocation->device] -= static_cast<int64_t>(allocation->bytes);
    state().blocks[allocation->device].now -= allocation->bytes > 0;
    // The memory is given out again in the order of its home stream, which may wait for the others until then.
    auto name = std::to_string(allocation->bytes) + " bytes of " + shown(allocation->home) + " were freed while ";
    auto& freed = state().freed[allocation->home];
    for (auto& [stream, until] : allocation->reads)
      if (stream != allocation->home && until > state().host && !allocation->recorded.count(stream))
        freed.push_back({until, name + shown(stream) + " reads them"});
    if (allocation->writer != allocation->home && allocation->written > state().host &&
        !allocation->recorded.count(allocation->writer))
      freed.push_back({allocation->written, name + shown(allocation->writer) + " writes them"});
  }
  std::free(allocation->memory);
  delete allocation;
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    int device = current_device;
    {
      Lock lock(state().mutex);
      auto& used = state().used[device];
      auto cap = state().cap[device];
      auto& blocks = state().blocks[device];
      if (cap > 0 && used + static_cast<int64_t>(bytes) > cap) {
        ++blocks.refused;
        C10_THROW_ERROR(
            OutOfMemoryError,
            "sim:" + std::to_string(device) + " out of memory: tried to allocate " + std::to_string(bytes) +
                " bytes, with " + std::to_string(used) + " of " + std::to_string(cap) + " in use");
      }
      blocks.now += bytes > 0;
      blocks.ever += bytes > 0;
      blocks.bytes_ever += static_cast<int64_t>(bytes);
      blocks.most = std::max(blocks.most, blocks.now);
      used += static_cast<int64_t>(bytes);
      state().peak[device] = std::max(state().peak[device], used);
    }
    void* memory = nullptr;
    if (bytes && posix_memalign(&memory, 64, bytes)) std::abort();
    auto* allocation = new Allocation{memory, bytes, device, stream_of(device)};
    return {memory, allocation, &release, c10::Device(kSim, static_cast<c10::DeviceIndex>(device))};
  }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
};

DeviceAllocator allocator;
REGISTER_ALLOCATOR(kSim, &allocator);

void release_pinned(void* memory) {
  Lock lock(state().mutex);
  state().pinned.erase(static_cast<const char*>(memory));
  std::free(memory);
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* memory = nullptr;
    if (posix_memalign(&memory, 64, std::max<size_t>(bytes, 1))) std::abort();
    Lock lock(state().mutex);
    state().pinned[static_cast<const char*>(memory)] = std::max<size_t>(bytes, 1);
    return {memory, memory, &release_pinned, c10::Device(c10::DeviceType::CPU)};
  }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
  c10::DeleterFnPtr raw_deleter() const override { return &release_pinned; }
};

PinnedAllocator pinned_allocator;

bool is_pinned(const void* memory) {
  Lock lock(state().mutex);
  auto after = state().pinned.upper_bound(static_cast<const char*>(memory));
  if (after == state().pinned.begin()) return false;
  auto& [start, bytes] = *std::prev(after);
  return static_cast<const char*>(memory) < start + bytes;
}

Allocation* allocation_of(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.device().type() != kSim || !tensor.has_storage()) return nullptr;
  const auto& pointer = tensor.storage().data_ptr();
  return pointer.get_deleter() == &release ? static_cast<Allocation*>(pointer.get_context()) : nullptr;
}

// The clock

double begin_on(StreamKey stream) { return std::max(state().streams[stream], state().host); }

// When work that is given to a stream now begins. It may be given memory that was freed before.
double begin_work(StreamKey stream) {
  double start = begin_on(stream);
  auto freed = state().freed.find(stream);
  if (freed != state().freed.end()) {
    for (auto& each : freed->second)
      if (each.until > start) state().hazards.push_back(each.what);
    state().freed.erase(freed);
  }
  return start;
}

void check_read(Allocation* allocation, StreamKey stream, double start, const std::string& what) {
  if (allocation && allocation->writer != stream && allocation->written > start)
    state().hazards.push_back(what + " on " + shown(stream) + " reads what " + shown(allocation->writer) + " still writes");
}

void check_write(Allocation* allocation, StreamKey stream, double start, const std::string& what) {
  if (!allocation) return;
  for (auto& [reader, until] : allocation->reads)
    if (reader != stream && until > start)
      state().hazards.push_back(what + " on " + shown(stream) + " overwrites what " + shown(reader) + " still reads");
  if (allocation->writer != stream && allocation->written > start)
    state().hazards.push_back(what + " on " + shown(stream) + " overwrites what " + shown(allocation->writer) + " still writes");
}

void mark_read(Allocation* allocation, StreamKey stream, double end) {
  if (allocation) allocation->reads[stream] = std::max(allocation->reads[stream], end);
}

void mark_written(Allocation* allocation, StreamKey stream, double end) {
  if (!allocation) return;
  allocation->written = end;
  allocation->writer = stream;
}

double seconds(int64_t bytes, double rate) { return rate > 0 ? static_cast<double>(bytes) / rate : 0; }

void count_copy(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  if (inside_kernel) return;
  bool from_host = from.is_cpu(), to_host = to.is_cpu();
  if (from_host != to_host && (!non_blocking || !is_pinned((from_host ? from : to).storage().data())))
    report(from_host ? "copy to the device" : "copy to the host");
  Lock lock(state().mutex);
  auto direction = from_host ? kToDevice : to_host ? kToHost : from.device() == to.device() ? kDirections : kBetween;
  auto bytes = static_cast<int64_t>(from.nbytes());
  auto stream = stream_of((to_host ? from : to).device().index());
  double start = begin_work(stream);
  if (direction == kBetween) start = std::max(start, begin_on(stream_of(from.device().index())));
  check_read(allocation_of(from), stream, start, "copy");
  check_write(allocation_of(to), stream, start, "copy");
  if (direction == kDirections) state().kernels += 1;
  double rate = direction == kDirections ? state().kernel_rate : state().copy_rate[direction];
  // A copy within a device is a kernel, which reads and writes.
  double end = start + seconds(direction == kDirections ? bytes + static_cast<int64_t>(to.nbytes()) : bytes, rate);
  state().streams[stream] = end;
  if (direction == kBetween) state().streams[stream_of(from.device().index())] = end;
  mark_read(allocation_of(from), stream, end);
  mark_written(allocation_of(to), stream, end);
  if (direction == kDirections) return;
  state().copies[direction] += 1;
  state().copied[direction] += bytes;
  if (direction == kBetween) return;
  const void* host_memory = (from_host ? from : to).storage().data();
  if (!non_blocking || !is_pinned(host_memory)) state().host = std::max(state().host, end);
}

// The guard, which torch asks for devices, streams and events

struct Event {
  double time;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kSim; }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    current_device = device.index();
    return before;
  }
  c10::Device getDevice() const override { return {kSim, static_cast<c10::DeviceIndex>(current_device)}; }
  void setDevice(c10::Device device) const override { current_device = device.index(); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current_device = device.index(); }
  c10::DeviceIndex deviceCount() const noexcept override { return static_cast<c10::DeviceIndex>(state().devices); }

  c10::Stream getStream(c10::Device device) const override { return stream(device, current_stream[index(device)]); }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream(device, 0); }
  c10::Stream getNewStream(c10::Device device, int) const override {
    Lock lock(state().mutex);
    return stream(device, ++state().made[index(device)]);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream next) const override {
    auto before = getStream(next.device());
    current_stream[next.device_index()] = next.id();
    return before;
  }
  bool queryStream(const c10::Stream& asked) const override {
    Lock lock(state().mutex);
    state().host += 1e-6;  // so that polling ends
    return state().streams[key(asked)] <= state().host;
  }
  void synchronizeStream(const c10::Stream& asked) const override {
    report("synchronize of a stream");
    Lock lock(state().mutex);
    state().host = std::max(state().host, state().streams[key(asked)]);
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    report("synchronize of the device");
    Lock lock(state().mutex);
    for (auto& [stream, time] : state().streams)
      if (stream.first == device) state().host = std::max(state().host, time);
  }

  void record(void** event, const c10::Stream& on, const c10::DeviceIndex, const c10::EventFlag) const override {
    Lock lock(state().mutex);
    if (!*event) *event = new Event;
    static_cast<Event*>(*event)->time = begin_on(key(on));
  }
  void block(void* event, const c10::Stream& waiting) const override {
    Lock lock(state().mutex);
    auto& time = state().streams[key(waiting)];
    if (event) time = std::max(time, static_cast<Event*>(event)->time);
  }
  bool queryEvent(void* event) const override {
    Lock lock(state().mutex);
    state().host += 1e-6;
    return !event || static_cast<Event*>(event)->time <= state().host;
  }
  void synchronizeEvent(void* event) const override {
    report("synchronize of an event");
    Lock lock(state().mutex);
    if (event) state().host = std::max(state().host, static_cast<Event*>(event)->time);
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    return 1e3 * (static_cast<Event*>(second)->time - static_cast<Event*>(first)->time);
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void recordDataPtrOnStream(const c10::DataPtr& pointer, const c10::Stream& on) const override {
    Lock lock(state().mutex);
    if (pointer.get_deleter() == &release) static_cast<Allocation*>(pointer.get_context())->recorded.insert(key(on));
  }

 private:
  static int index(c10::Device device) { return device.has_index() ? device.index() : current_device; }
  static StreamKey key(const c10::Stream& given) { return {given.device_index(), given.id()}; }
  static c10::Stream stream(c10::Device device, c10::StreamId id) {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(kSim, static_cast<c10::DeviceIndex>(index(device))), id);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// Random numbers: each device has a generator of its own, whose kernels run on the CPU with its state

struct Generator final : c10::GeneratorImpl {
  explicit Generator(c10::DeviceIndex device, at::Generator numbers = at::detail::createCPUGenerator())
      : GeneratorImpl({kSim, device}, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)), inner(std::move(numbers)) {}
  void set_current_seed(uint64_t seed) override { inner.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { inner.set_offset(offset); }
  uint64_t get_offset() const override { return inner.get_offset(); }
  uint64_t current_seed() const override { return inner.current_seed(); }
  uint64_t seed() override { return inner.unsafeGetGeneratorImpl()->seed(); }
  void set_state(const c10::TensorImpl& given) override { inner.unsafeGetGeneratorImpl()->set_state(given); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return inner.unsafeGetGeneratorImpl()->get_state();
  }
  at::Generator inner;

 private:
  Generator* clone_impl() const override { return new Generator(device_.index(), inner.clone()); }
};

const at::Generator& generator_of(int device) {
  static auto* made = new std::array<at::Generator, kMaxDevices>([] {
    std::array<at::Generator, kMaxDevices> all;
    for (int number = 0; number < kMaxDevices; ++number)
      all[number] = at::make_generator<Generator>(static_cast<c10::DeviceIndex>(number));
    return all;
  }());
  return (*made)[device];
}

at::Generator numbers_of(const at::Generator& generator) {
  return static_cast<Generator*>(generator.unsafeGetGeneratorImpl())->inner;
}

// While it lives, the CPU's default generator has the state of a device's.
class Lent {
 public:
  explicit Lent(int device)
      : inner_(numbers_of(generator_of(device))), cpu_(at::detail::getDefaultCPUGenerator()), before_(cpu_.get_state()) {
    cpu_.set_state(inner_.get_state());
  }
  ~Lent() {
    inner_.set_state(cpu_.get_state());
    cpu_.set_state(before_);
  }

 private:
  at::Generator inner_, cpu_;
  at::Tensor before_;
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  c10::DeviceIndex deviceCount() const override { return static_cast<c10::DeviceIndex>(state().devices); }
  c10::DeviceIndex getCurrentDevice() const override { return static_cast<c10::DeviceIndex>(current_device); }
  void setCurrentDevice(c10::DeviceIndex device) const override { current_device = device; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    auto before = getCurrentDevice();
    current_device = device;
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return generator_of(device < 0 ? current_device : device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::make_generator<Generator>(static_cast<c10::DeviceIndex>(device < 0 ? current_device : device));
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    c10::DeviceGuard guard(storage.device());
    auto other = allocator.allocate(bytes);
    if (auto kept = std::min(bytes, storage.nbytes())) std::memcpy(other.get(), storage.data(), kept);
    storage.set_data_ptr_noswap(std::move(other));
    storage.set_nbytes(bytes);
  }
  bool isPinnedPtr(const void* memory) const override { return is_pinned(memory); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
};

// Operators: those that make and copy tensors are here, all others run on the CPU

c10::Device resolved(std::optional<c10::Device> given) {
  auto device = given.value_or(c10::Device(kSim));
  int index = device.has_index() ? device.index() : current_device;
  TORCH_CHECK(index < state().devices, "sim:", index, " does not exist; there are ", state().devices);
  return {kSim, static_cast<c10::DeviceIndex>(index)};
}

constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

at::Tensor empty(
    c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
    std::optional<c10::Device> device, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  c10::DeviceGuard guard(resolved(device));
  return at::detail::empty_generic(size, &allocator, kKeys, dtype.value_or(at::kFloat), format);
}

at::Tensor empty_strided(
    c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
    std::optional<c10::Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(resolved(device));
  return at::detail::empty_strided_generic(size, stride, &allocator, kKeys, dtype.value_or(at::kFloat));
}

at::Tensor on_cpu(const at::Tensor& tensor) {
  if (tensor.is_cpu()) return tensor;
  auto options = tensor.options().device(at::kCPU).requires_grad(false);
  auto count = static_cast<int64_t>(tensor.storage().nbytes() / tensor.element_size());
  return at::from_blob(tensor.storage().mutable_data(), {count}, options)
      .as_strided(tensor.sizes(), tensor.strides(), tensor.storage_offset());
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  at::NoGradGuard no_grad;
  count_copy(from, to, non_blocking);
  on_cpu(to).copy_(on_cpu(from));
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (to.sizes() != from.sizes()) to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar local_scalar(const at::Tensor& tensor) {
  auto device = tensor.device().index();
  report("item");
  Lock lock(state().mutex);
  state().host = std::max(state().host, state().streams[stream_of(device)]);
  return on_cpu(tensor).item();
}

// A kernel on the current stream of the tensors' device: the clock and what the tensors are read and written by.
void launched(const at::TensorList read, const at::TensorList written, const std::string& what, double takes) {
  if (inside_kernel || (read.empty() && written.empty())) return;
  Lock lock(state().mutex);
  auto stream = stream_of((written.empty() ? read : written)[0].device().index());
  double start = begin_work(stream), end = start + takes;
  for (auto& tensor : read) check_read(allocation_of(tensor), stream, start, what);
  for (auto& tensor : written) check_write(allocation_of(tensor), stream, start, what);
  state().streams[stream] = end;
  state().kernels += 1;
  for (auto& tensor : read) mark_read(allocation_of(tensor), stream, end);
  for (auto& tensor : written) mark_written(allocation_of(tensor), stream, end);
}

at::Tensor& fill(at::Tensor& tensor, const at::Scalar& value) {
  launched({}, {tensor}, "fill_", seconds(static_cast<int64_t>(tensor.nbytes()), state().kernel_rate));
  return on_cpu(tensor).fill_(value), tensor;
}
at::Tensor& zero(at::Tensor& tensor) {
  launched({}, {tensor}, "zero_", seconds(static_cast<int64_t>(tensor.nbytes()), state().kernel_rate));
  return on_cpu(tensor).zero_(), tensor;
}

at::Tensor as_strided(
    const at::Tensor& tensor, c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<c10::SymInt> offset) {
  auto start = offset ? std::optional<int64_t>(offset->expect_int()) : std::nullopt;
  return at::native::as_strided_tensorimpl(tensor, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), start);
}

at::Tensor view(const at::Tensor& tensor, c10::SymIntArrayRef size) {
  return at::native::view(tensor, C10_AS_INTARRAYREF_SLOW(size));
}

at::Tensor reshape_alias(const at::Tensor& tensor, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(tensor, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

const at::Tensor& resize(const at::Tensor& tensor, c10::SymIntArrayRef size, std::optional<c10::MemoryFormat>) {
  auto* implementation = tensor.unsafeGetTensorImpl();
  implementation->set_sizes_contiguous(C10_AS_INTARRAYREF_SLOW(size));
  auto needed = static_cast<size_t>(implementation->numel() + implementation->storage_offset()) * tensor.element_size();
  auto storage = tensor.storage();
  if (needed > storage.nbytes()) {
    c10::DeviceGuard guard(tensor.device());
    auto larger = allocator.allocate(needed);
    if (storage.nbytes()) std::memcpy(larger.get(), storage.data(), storage.nbytes());
    storage.set_data_ptr(std::move(larger));
    storage.set_nbytes(needed);
  }
  return tensor;
}

at::Tensor& set_storage(
    at::Tensor& tensor, at::Storage storage, c10::SymInt offset, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  auto* implementation = tensor.unsafeGetTensorImpl();
  implementation->set_storage_and_dtype(storage, tensor.dtype());
  implementation->set_storage_offset(offset.expect_int());
  implementation->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
  return tensor;
}

at::Tensor& set_whole_storage(at::Tensor& tensor, at::Storage storage) {
  auto size = static_cast<int64_t>(storage.nbytes() / tensor.element_size());
  return set_storage(tensor, storage, 0, {size}, {1});
}

void record_stream(at::Tensor& tensor, at::Stream stream) {
  Lock lock(state().mutex);
  if (auto* allocation = allocation_of(tensor)) allocation->recorded.insert({stream.device_index(), stream.id()});
}

void collect(const c10::IValue& value, std::vector<at::Tensor>& found) {
  if (value.isTensor()) {
    if (value.toTensor().defined() && value.toTensor().device().type() == kSim) found.push_back(value.toTensor());
  } else if (value.isList()) {
    for (const auto& each : value.toListRef()) collect(each, found);
  }
}

const std::set<std::string> kDependOnValues{
    "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive",
    "aten::bincount", "aten::repeat_interleave", "aten::equal"};

bool has_mask(const std::vector<at::Tensor>& tensors) {
  return std::any_of(tensors.begin(), tensors.end(), [](auto& each) {
    return each.scalar_type() == at::kBool || each.scalar_type() == at::kByte;
  });
}

// A kernel: what it reads and writes is checked against the clock, then it runs on the CPU.
void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  auto first = stack->size() - schema.arguments().size();
  std::vector<at::Tensor> read, written, results, changed;
  bool has_generator = false;
  for (size_t number = 0; number < schema.arguments().size(); ++number) {
    auto* alias = schema.arguments()[number].alias_info();
    auto& value = (*stack)[first + number];
    // Its schema does not say that training writes the running statistics, so they would be written to copies.
    bool statistics = schema.name() == "aten::native_batch_norm" && (number == 3 || number == 4) &&
        (*stack)[first + 5].toBool();
    collect(value, statistics || (alias && alias->isWrite()) ? written : read);
    if (alias && alias->isWrite() && !schema.arguments()[number].is_out()) collect(value, changed);
    if (statistics && value.isTensor() && value.toTensor().defined()) value = on_cpu(value.toTensor());
    if (value.isGenerator() && value.toGenerator().defined()) {
      has_generator = true;
      if (value.toGenerator().device().type() == kSim) value = numbers_of(value.toGenerator());
    }
  }
  const auto* device = !read.empty() ? &read[0] : !written.empty() ? &written[0] : nullptr;
  auto stream = stream_of(device ? device->device().index() : current_device);
  double start;
  {
    Lock lock(state().mutex);
    start = inside_kernel ? begin_on(stream) : begin_work(stream);
    if (!inside_kernel) {
      for (auto& tensor : read) check_read(allocation_of(tensor), stream, start, schema.name());
      for (auto& tensor : written) check_write(allocation_of(tensor), stream, start, schema.name());
    }
  }
  // Their outputs' sizes depend on values, which the host has to wait for.
  bool reads_values = kDependOnValues.count(schema.name()) || (schema.name() == "aten::index" && has_mask(read));
  if (reads_values) report(schema.name().c_str());
  bool is_random = !inside_kernel && !has_generator && op.hasTag(at::Tag::nondeterministic_seeded);
  ++inside_kernel;
  try {
    auto lent = is_random ? std::make_unique<Lent>(stream.first) : nullptr;
    at::native::cpu_fallback(op, stack);
  } catch (...) {
    --inside_kernel;
    throw;
  }
  --inside_kernel;
  if (inside_kernel) return;
  for (size_t number = stack->size() - schema.returns().size(); number < stack->size(); ++number)
    collect((*stack)[number], results);
  Lock lock(state().mutex);
  int64_t bytes = 0;
  // What an operation changes in place is read and written. Results may be tensors that it has written.
  for (auto* tensors : {&read, &written, &changed})
    for (auto& tensor : *tensors) bytes += static_cast<int64_t>(tensor.nbytes());
  for (auto& tensor : results)
    if (std::none_of(written.begin(), written.end(), [&](auto& each) { return each.is_same(tensor); }))
      bytes += static_cast<int64_t>(tensor.nbytes());
  double end = start + seconds(bytes, state().kernel_rate);
  state().streams[stream] = end;
  state().kernels += 1;
  if (reads_values) state().host = std::max(state().host, end);
  for (auto& tensor : read) mark_read(allocation_of(tensor), stream, end);
  for (auto* tensors : {&written, &results})
    for (auto& tensor : *tensors) mark_written(allocation_of(tensor), stream, end);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("_copy_from", &copy_from);
  library.impl("_copy_from_and_resize", &copy_from_and_resize);
  library.impl("_local_scalar_dense", &local_scalar);
  library.impl("fill_.Scalar", &fill);
  library.impl("zero_", &zero);
  library.impl("as_strided", &as_strided);
  library.impl("view", &view);
  library.impl("_reshape_alias", &reshape_alias);
  library.impl("resize_", &resize);
  library.impl("set_.source_Storage_storage_offset", &set_storage);
  library.impl("set_.source_Storage", &set_whole_storage);
  library.impl("record_stream", &record_stream);
  // torch composes these of others, one of which the device would have to have, or which need another layout.
  for (const char* name : {"convolution", "convolution_backward", "native_group_norm"})
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
}

// What tests/simulated/collectives.py calls: a view of the memory for the CPU, and a kernel of so many seconds.

TORCH_LIBRARY(sim, library) {
  library.def("on_cpu(Tensor(a) given) -> Tensor(a)", [](const at::Tensor& given) { return on_cpu(given); });
  library.def("launch(Tensor[] read, Tensor[] written, str what, float seconds) -> ()",
              [](const std::vector<at::Tensor>& read, const std::vector<at::Tensor>& written, const std::string& what,
                 double takes) { launched(read, written, what, takes); });
  library.def("random_state(int device) -> Tensor", [](int64_t device) { return generator_of(device).get_state(); });
  library.def("set_random_state(int device, Tensor given) -> ()", [](int64_t device, const at::Tensor& given) {
    auto generator = generator_of(device);
    generator.set_state(given);
  });
}

}  // namespace

// Autocast, with the operations that CUDA computes in low and in full precision

namespace at::autocast {

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
#define SIM_LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define SIM_FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define SIM_FP32_DTYPE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define SIM_PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  AT_FORALL_LOWER_PRECISION_FP(SIM_LOWER)
  AT_FORALL_FP32(SIM_FP32)
  AT_FORALL_FP32_SET_OPT_DTYPE(SIM_FP32_DTYPE)
  AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(KERNEL_DIFFERENT_REDISPATCH_SIGNATURE_PRIVATEUSEONE)
  AT_FORALL_PROMOTE(SIM_PROMOTE)
}

}  // namespace at::autocast

// What tests/simulated/devices.py calls

extern "C" {

void sim_start(int devices) {
  state().devices = std::min(devices, kMaxDevices);
  at::RegisterPrivateUse1HooksInterface(new Hooks);
}
int sim_devices() { return state().devices; }
int sim_current_device() { return current_device; }
void sim_set_device(int device) { current_device = device; }

void sim_set_cap(int device, int64_t bytes) { state().cap[device] = bytes; }
int64_t sim_cap(int device) { return state().cap[device]; }
int64_t sim_used(int device) { return state().used[device]; }
int64_t sim_peak(int device) { return state().peak[device]; }
void sim_reset_peak(int device) {
  state().peak[device] = state().used[device];
  state().blocks[device].most = state().blocks[device].now;
}
int64_t sim_blocks(int device) { return state().blocks[device].now; }
int64_t sim_most_blocks(int device) { return state().blocks[device].most; }
int64_t sim_blocks_ever(int device) { return state().blocks[device].ever; }
int64_t sim_bytes_ever(int device) { return state().blocks[device].bytes_ever; }
int64_t sim_refused(int device) { return state().blocks[device].refused; }

int64_t sim_copies(int direction) { return state().copies[direction]; }
int64_t sim_copied_bytes(int direction) { return state().copied[direction]; }

// Bytes a second of copies in each direction and of kernels; 0 takes no time. The clock and all counts begin again.
void sim_reset_clock(double to_device, double to_host, double between, double kernels) {
  Lock lock(state().mutex);
  state().copy_rate = {to_device, to_host, between};
  state().kernel_rate = kernels;
  for (auto& [stream, time] : state().streams) state().host = std::max(state().host, time);
  state().origin = state().host;
  state().copies = {};
  state().copied = {};
  state().kernels = 0;
  state().freed.clear();
  state().hazards.clear();
}
int64_t sim_kernels() { return state().kernels; }
void sim_on_synchronise(void (*called)(const char*)) { state().synchronised = called; }
void sim_seed(int device, uint64_t seed) {
  auto generator = generator_of(device);
  generator.set_current_seed(seed);
}
// Seconds that the host has seen go by.
double sim_now() { return state().host - state().origin; }
void sim_spend_on_host(double time) {
  Lock lock(state().mutex);
  state().host += time;
}
// A kernel without arguments, on the current stream of a device.
void sim_spend_on_device(int device, double time) {
  Lock lock(state().mutex);
  auto stream = stream_of(device);
  state().streams[stream] = begin_on(stream) + time;
}
// When the last work of a stream ends, and the earliest time at which a kernel that is launched now would begin.
double sim_stream_time(int device, int64_t stream) { return state().streams[{device, stream}] - state().origin; }
int64_t sim_hazards() { return static_cast<int64_t>(state().hazards.size()); }
const char* sim_hazard(int64_t number) { return state().hazards[number].c_str(); }
}
