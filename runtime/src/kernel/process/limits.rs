//! `RLIMIT_AS`: how large the guest's address space may become.
//!
//! The kernel counts the translator's memory, too, so the limit that the kernel gets is [`ROOM`]
//! higher than the guest's. The guest's own limit is kept in its `Process`, shown to the guest,
//! inherited by its children and by programs that it executes, and enforced when it maps memory
//! ([`System::may_map`]). A limit with which the translator itself was started is enforced by the
//! kernel only, until the guest changes it.
//!
//! Called for system calls, on the guest's own thread. The lock of `Process::address_space` is held
//! while a limit is changed, so that the kernel's limit and the guest's change together.
//!
//! Example: the guest sets 1 GiB, soft and hard. The kernel gets 17 GiB, getrlimit shows 1 GiB, and
//! an mmap that would make the guest's mappings larger than 1 GiB fails with ENOMEM.

use std::ffi::CString;
use std::ops::Range;

use dynasour_guest::space::{PAGE, page_up};

use super::guest_access::{guest_read, guest_write};
use super::{Done, System};
use crate::kernel::entry::Call;

/// Bytes of address space that the translator may use besides the guest's limit (guess; if it is
/// too small, the translator's own mappings fail).
const ROOM: u64 = 16 << 30;

/// Soft and hard limit of the address space, in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Limit {
    soft: u64,
    hard: u64,
}

impl Limit {
    fn read(address: u64) -> Result<Limit, i32> {
        Ok(Limit {
            soft: u64::from_le_bytes(guest_read(address)?),
            hard: u64::from_le_bytes(guest_read(address.wrapping_add(8))?),
        })
    }

    fn write(self, address: u64) -> Result<(), i32> {
        guest_write(address, [self.soft.to_le_bytes(), self.hard.to_le_bytes()].as_flattened())
    }

    /// The kernel's limit for this process.
    fn of_kernel() -> Limit {
        let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        // SAFETY: asks about this process.
        unsafe { libc::getrlimit(libc::RLIMIT_AS, &mut limit) };
        Limit { soft: limit.rlim_cur, hard: limit.rlim_max }
    }

    /// The limit that the kernel gets when the guest asks for `self`. `known` is the limit that the
    /// guest sees now, `kernel` the kernel's.
    fn with_room(self, known: Limit, kernel: Limit) -> Limit {
        let hard = match self.hard.saturating_add(ROOM) {
            // The guest may always lower its hard limit. The kernel would refuse to raise its own,
            // so the translator gets less room if the kernel's is too low.
            hard if self.hard <= known.hard => hard.min(kernel.hard),
            hard => hard,
        };
        Limit { soft: self.soft.saturating_add(ROOM).min(hard), hard }
    }

    /// The command line option that hands the limit to the translator of another program.
    pub(crate) fn option(self) -> Option<CString> {
        CString::new(format!("--address-space={}:{}", self.soft, self.hard)).ok()
    }
}

impl std::str::FromStr for Limit {
    type Err = String;

    fn from_str(text: &str) -> Result<Limit, String> {
        let number = |text: &str| text.parse().map_err(|_| "expected SOFT:HARD".to_string());
        let (soft, hard) = text.split_once(':').unwrap_or((text, text));
        Ok(Limit { soft: number(soft)?, hard: number(hard)? })
    }
}

/// The addresses of the new limit and of the place for the old one, each 0 if there is none, if this
/// `getrlimit`, `setrlimit` or `prlimit64` is about this resource of this process.
fn about(resource: libc::__rlimit_resource_t, nr: i64, call: &Call) -> Option<(u64, u64)> {
    let [first, second, third, fourth, ..] = call.args;
    let (pid, asked, new, old) = match nr {
        libc::SYS_getrlimit => (0, first, 0, second),
        libc::SYS_setrlimit => (0, first, second, 0),
        _ => (first as i32, second, third, fourth),
    };
    let is_own = pid == 0 || u32::try_from(pid) == Ok(std::process::id());
    (asked as u32 == resource && is_own).then_some((new, old))
}

/// May this call change the limit of this process's stack?
pub(crate) fn sets_stack_limit(nr: i64, call: &Call) -> bool {
    about(libc::RLIMIT_STACK, nr, call).is_some_and(|(new, _)| new != 0)
}

/// Bytes of all mappings of this process, the host's too (proc_pid_statm(5)).
fn mapped_by_all() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/thread-self/statm").ok()?;
    let pages: u64 = text.split(' ').next()?.parse().ok()?;
    Some(pages * PAGE)
}

impl System {
    /// Performs `getrlimit`, `setrlimit` and `prlimit64` if they are about this process's address
    /// space; `None` if not.
    pub(crate) fn limit_call(&self, nr: i64, call: &Call) -> Option<Done> {
        let (new, old) = about(libc::RLIMIT_AS, nr, call)?;
        let done = match nr {
            libc::SYS_setrlimit if new == 0 => Err(libc::EFAULT),
            _ => self.change_limit(new),
        };
        let is_asked = nr == libc::SYS_getrlimit || old != 0;
        let done = done.and_then(|before| if is_asked { before.write(old) } else { Ok(()) });
        Some(done.map_or_else(Done::error, |()| Done::Value(0)))
    }

    /// Sets the limit that the structure at address `new` contains; changes nothing if `new` is 0.
    /// Returns the limit from before. The error is an errno.
    fn change_limit(&self, new: u64) -> Result<Limit, i32> {
        let mut limit = self.process.address_space();
        let kernel = Limit::of_kernel();
        let known = limit.unwrap_or(kernel);
        if new != 0 {
            let wanted = Limit::read(new)?;
            if wanted.soft > wanted.hard {
                return Err(libc::EINVAL);
            }
            let told = wanted.with_room(known, kernel);
            let told = libc::rlimit { rlim_cur: told.soft, rlim_max: told.hard };
            // SAFETY: a limit of this process's own, which leaves the host room.
            if unsafe { libc::setrlimit(libc::RLIMIT_AS, &told) } != 0 {
                return Err(nix::errno::Errno::last_raw());
            }
            *limit = Some(wanted);
        }
        Ok(known)
    }

    /// Whether the guest's limit lets it map `len` bytes more if its mappings in the range
    /// `instead` go.
    pub(crate) fn may_map(&self, len: u64, instead: Range<u64>) -> bool {
        let soft = match *self.process.address_space() {
            Some(limit) if limit.soft != libc::RLIM_INFINITY => limit.soft,
            _ => return true,
        };
        let more = page_up(len).unwrap_or(u64::MAX);
        let is_within = |size: u64| size.saturating_add(more) <= soft;
        // To add the mappings up takes long if there are many. So the kernel's sum is asked first, which contains
        // the host's.
        more == 0
            || is_within(0)
                && (mapped_by_all().is_some_and(is_within)
                    || is_within(self.process.memory().guest_size(&instead)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_is_told_of_more() {
        const NONE: u64 = libc::RLIM_INFINITY;
        let limit = |soft, hard| Limit { soft, hard };
        let none = limit(NONE, NONE);
        assert_eq!(limit(5, 7).with_room(none, none), limit(ROOM + 5, ROOM + 7));
        assert_eq!(limit(5, NONE).with_room(none, none), limit(ROOM + 5, NONE));
        // The translator itself was started with a limit.
        let own = limit(1 << 30, 1 << 30);
        assert_eq!(limit(5, 7).with_room(own, own), own);
        // The guest asks for more than its hard limit: the kernel decides.
        assert_eq!(
            limit(5, 8).with_room(limit(5, 7), limit(ROOM + 5, ROOM + 7)),
            limit(ROOM + 5, ROOM + 8)
        );
        assert_eq!(
            limit(5, 7).option().and_then(|text| text.into_string().ok()).as_deref(),
            Some("--address-space=5:7")
        );
        assert_eq!("5:7".parse(), Ok(limit(5, 7)));
    }
}
