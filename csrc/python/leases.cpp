#include "leases.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <c10/util/Exception.h>
#include <pybind11/stl.h>

#include "../extensions/composites/gradient_formulas.h"
#include "../libraries/support/leases.h"
#include "../libraries/support/locks.h"
#include "bind.h"
#include "interpreter.h"
#include "module.h"

namespace torchext::python {

namespace {

void setActive(Lease& lease, bool is_active) {
  lease.setActive(is_active);
  if (&lease == &leaseOfFakes()) {
    makeGradientsFake(is_active);
  }
}

// An autocast region is entered and left in less than a microsecond, and usually is the only holder of its lease. The
// same holds for marked tensors in a loop, and small modules are deferred and materialized in microseconds. So Python
// provides the steps in advance, for the time in which no rival, which replaces the same functions, is active.
struct Switch {
  bool is_offered = false;
  pybind11::tuple on;
  pybind11::tuple off;
  std::vector<const Lease*> rivals;
};

// By lease. Leaked: holders may be destroyed while the process ends.
std::map<Lease*, Switch>& switches() {
  static auto* all = new std::map<Lease*, Switch>;
  return *all;
}

void offerSwitch(Lease& lease,
                 const pybind11::tuple& on,
                 const pybind11::tuple& off,
                 const std::vector<const Lease*>& rivals) {
  switches()[&lease] = {true, on, off, rivals};
}

void withdrawSwitches() {
  for (auto& [lease, offered] : switches()) {
    offered.is_offered = false;
  }
}

// Settles `lease` at once by the steps that Python provided. Returns false if `settle()` must be called.
bool switchLease(Lease& lease, bool is_wanted) noexcept {
  const auto found = switches().find(&lease);
  if (found == switches().end() || !found->second.is_offered) {
    return false;
  }
  const auto& rivals = found->second.rivals;
  if (std::any_of(rivals.begin(), rivals.end(), [](const Lease* rival) { return rival->isActive(); })) {
    return false;
  }
  try {
    const pybind11::tuple steps = is_wanted ? found->second.on : found->second.off;  // may be replaced while they run
    exchange(steps);
    setActive(lease, is_wanted);
  } catch (const std::exception&) {
    return false;  // settling the lease raises the error again
  }
  return lease.isHeld() == is_wanted;  // a garbage collection may have run other code
}

// Returns true if the functions are replaced.
bool hold(Lease& lease) {
  lease.hold();
  return lease.isActive() || switchLease(lease, true);
}

// Whether a call that settles leases is pending in the interpreter.
std::atomic<bool> is_pending{false};

int settleWhenAsked(void* /*unused*/) {
  is_pending = false;
  const pybind11::gil_scoped_acquire gil;
  const bool are_settled = std::all_of(switches().begin(), switches().end(), [](const auto& entry) {
    Lease& lease = *entry.first;
    return lease.isActive() == lease.isHeld() || switchLease(lease, lease.isHeld());
  });
  if (are_settled) {
    return 0;
  }
  try {
    pybind11::reinterpret_borrow<pybind11::object>(provided(Provided::kSettleLeases))(false);
  } catch (pybind11::error_already_set& error) {
    error.discard_as_unraisable("torchext.internals.leases.settle()");
  }
  return 0;
}

// The last holder may be destroyed anywhere: without the GIL, or during garbage collection. So the main thread settles
// the leases when it is next between two instructions.
void settleLeasesSoon(Lease& lease) {
  if (Py_IsInitialized() == 0) {
    return;  // open blocks end with their thread, tensors in the last garbage collection
  }
  if (PyGILState_Check() != 0 && PyErr_Occurred() == nullptr && !lease.isHeld() && switchLease(lease, false)) {
    return;
  }
  if (!is_pending.exchange(true) && Py_AddPendingCall(&settleWhenAsked, nullptr) != 0) {
    is_pending = false;  // the queue is full; the next block or destruction tries again
  }
}

}  // namespace

bool settleLeases() {
  const auto settle = [](Lease& lease) { return lease.isActive() || !lease.isHeld() || switchLease(lease, true); };
  if (settle(leaseOfRegions()) && settle(leaseOfMarks())) {
    return true;
  }
  PyObject* const done = PyObject_CallOneArg(provided(Provided::kSettleLeases), Py_True);
  Py_XDECREF(done);
  return done != nullptr;
}

void bindLeases(pybind11::module_& module) {
  setLeaseListener(&settleLeasesSoon);
  pybind11::class_<Lease, std::unique_ptr<Lease, pybind11::nodelete>>(module, "Lease")
      .def(pybind11::init([] { return new Lease; }))  // never freed: one per feature
      .def("hold", &hold)
      .def("release",
           [](Lease& lease) {
             lease.release();
             return lease.isActive() == lease.isHeld();
           })
      .def("is_held", &Lease::isHeld)
      .def("is_active", &Lease::isActive)
      .def("set_active", &setActive);
  module.attr("lease_of_fakes") = pybind11::cast(&leaseOfFakes(), pybind11::return_value_policy::reference);
  module.attr("lease_of_marks") = pybind11::cast(&leaseOfMarks(), pybind11::return_value_policy::reference);
  module.attr("lease_of_regions") = pybind11::cast(&leaseOfRegions(), pybind11::return_value_policy::reference);
  module.def("offer_switch", &offerSwitch);
  module.def("withdraw_switches", &withdrawSwitches);
}

namespace {

LockRank rankOf(const std::string& name) {
  const std::vector<LockRank> all = allLocks();
  const auto found = std::find_if(all.begin(), all.end(), [&name](LockRank rank) { return nameOf(rank) == name; });
  TORCH_CHECK_VALUE(found != all.end(), "There is no lock \"", name, "\".");
  return *found;
}

// A lock under which Python code may run.
class Lock {
 public:
  explicit Lock(const std::string& name) : rank_{rankOf(name)} {
    TORCH_CHECK_VALUE(isOutsideOfInterpreter(rank_), "Python code must not run while \"", name, "\" is held.");
  }

  bool acquire(bool blocking) const {
    if (!blocking) {
      return tryToAcquire(rank_);
    }
    torchext::acquire(rank_);
    return true;
  }

  void release() const {
    TORCH_CHECK(isHeld(rank_), "release(): this thread does not hold the lock \"", nameOf(rank_), "\".");
    torchext::release(rank_);
  }

 private:
  LockRank rank_;
};

// Acquires the outer locks before Python takes its import lock for a fork: code that holds an outer lock may wait for
// the import lock.
void surviveForksOfPython() {
  using pybind11::arg;
  pybind11::module_::import("os").attr("register_at_fork")(
      arg("before") = pybind11::cpp_function{&acquireOuterLocks},
      arg("after_in_parent") = pybind11::cpp_function{&releaseOuterLocks},
      arg("after_in_child") = pybind11::cpp_function{&releaseOuterLocks});
}

}  // namespace

void bindLocks(pybind11::module_& module) {
  pybind11::class_<Lock>(module, "Lock")
      .def(pybind11::init(torch::wrap_pybind_function([](const std::string& name) { return Lock{name}; })))
      .def("acquire", &Lock::acquire, pybind11::arg("blocking") = true)
      .def("release", &Lock::release);
  surviveForksOfPython();
}

}  // namespace torchext::python
