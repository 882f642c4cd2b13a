// What PyTorch's C++ asks of a device before it makes a tensor that says it lies there: which index, which stream.
// `install` answers for a device type that this build has not, and `remove` leaves the process as it was.
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace torch::utils {
void set_requires_device_init(c10::DeviceType kind, bool value);
}

namespace {
using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Stream;

template <DeviceType kind>
struct FirstDevice final : c10::impl::NoOpDeviceGuardImpl<kind> {
  Device exchangeDevice(Device) const override { return {kind, 0}; }
  Device getDevice() const override { return {kind, 0}; }
  Stream getStream(Device) const noexcept override { return Stream(Stream::DEFAULT, {kind, 0}); }
  Stream getNewStream(Device, int) const override { return Stream(Stream::DEFAULT, {kind, 0}); }
  Stream exchangeStream(Stream) const noexcept override { return Stream(Stream::DEFAULT, {kind, 0}); }
  DeviceIndex deviceCount() const noexcept override { return 0; } // so that the autograd engine starts no thread
};

const FirstDevice<DeviceType::CUDA> cuda;
const FirstDevice<DeviceType::MPS> mps;
const c10::impl::DeviceGuardImplInterface* before = nullptr;

auto& guard_of(int kind) {
  return c10::impl::device_guard_impl_registry[static_cast<size_t>(kind)];
}
} // namespace

extern "C" void install(int kind) {
  const c10::impl::DeviceGuardImplInterface* guard = &mps;
  if (kind == static_cast<int>(DeviceType::CUDA)) guard = &cuda;
  before = guard_of(kind).exchange(guard);
}

extern "C" void remove_guard(int kind) {
  guard_of(kind).store(before);
  torch::utils::set_requires_device_init(static_cast<DeviceType>(kind), true);
}

extern "C" int is_installed(int kind) {
  return guard_of(kind).load() != nullptr;
}
