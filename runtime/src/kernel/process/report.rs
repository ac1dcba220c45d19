//! The descriptor for the report at the process's end, and the calls that would close it.
//!
//! Programs close their standard error before they end (coreutils do), so the report goes to a
//! duplicate of the descriptor that the process began with. To the guest the duplicate does not
//! exist: it cannot close it, and a `dup2` onto its number moves it elsewhere. A process that has
//! nothing to report has no such descriptor, and neither have its children.

use super::{Done, System};
use crate::kernel::entry::{self, Call};

/// The lowest number of the duplicate, since programs expect low numbers (guess).
const LOWEST: u64 = 200;

/// The descriptor for the report of one process.
#[derive(Debug)]
pub(crate) struct Report {
    fd: i32,
}

impl Report {
    /// Duplicates standard error. If that is closed, no report is written.
    pub(crate) fn new() -> Report {
        Report { fd: duplicate(libc::STDERR_FILENO) }
    }

    /// Where to write; closed (a negative number) if there is no such place.
    pub(crate) fn descriptor(&self) -> i32 {
        self.fd
    }

    fn is(&self, fd: i32) -> bool {
        fd >= 0 && fd == self.fd
    }

    /// Moves the duplicate to another number: the guest wants this one.
    fn move_away(&mut self) {
        let elsewhere = duplicate(self.fd);
        close(std::mem::replace(&mut self.fd, elsewhere));
    }
}

impl Drop for Report {
    fn drop(&mut self) {
        close(self.fd);
    }
}

fn duplicate(fd: i32) -> i32 {
    let call =
        |lowest| Call::new(libc::SYS_fcntl, &[fd as u64, libc::F_DUPFD_CLOEXEC as u64, lowest]);
    // SAFETY: makes a new descriptor of the host.
    let high = unsafe { entry::raw(&call(LOWEST)) } as i32;
    // A low limit on descriptors leaves no high ones.
    // SAFETY: as above.
    if high >= 0 { high } else { unsafe { entry::raw(&call(3)) as i32 } }
}

fn close(fd: i32) {
    if fd >= 0 {
        // SAFETY: the descriptor belongs to the host.
        unsafe { entry::raw(&Call::new(libc::SYS_close, &[fd as u64])) };
    }
}

impl System {
    /// `close`, `close_range`, `dup2`, `dup3`.
    pub(crate) fn descriptor_call(&self, nr: i64, call: &Call) -> Done {
        let [first, second, flags, ..] = call.args;
        // The call itself is made without the lock.
        let fd = match &mut *self.process.report() {
            None => return self.pass(call),
            Some(report) => {
                if matches!(nr, libc::SYS_dup2 | libc::SYS_dup3)
                    && report.is(second as i32)
                    && !report.is(first as i32)
                {
                    report.move_away();
                }
                report.fd
            }
        };
        match nr {
            libc::SYS_close | libc::SYS_dup2 | libc::SYS_dup3 if fd >= 0 && first as i32 == fd => {
                Done::error(libc::EBADF)
            }
            libc::SYS_close_range => {
                let own = fd as u32;
                let (first, last) = (first as u32, second as u32);
                if fd < 0 || !(first..=last).contains(&own) {
                    return self.pass(call);
                }
                let part = |a: u32, b: u32| Call::new(nr, &[a.into(), b.into(), flags]);
                let below = (first < own).then(|| part(first, own - 1));
                let above = (own < last).then(|| part(own + 1, last));
                let mut done = Done::Value(0);
                for call in [below, above].into_iter().flatten() {
                    done = self.pass(&call);
                    if done != Done::Value(0) {
                        break;
                    }
                }
                done
            }
            _ => self.pass(call),
        }
    }

    /// Does the call end this process by SIGKILL while there is something to do first: to report,
    /// or to release locks in memory that other processes use?
    pub(crate) fn is_own_end(&self, nr: i64, call: &Call) -> bool {
        if !self.process.reports() && !self.process.shares_memory() {
            return false;
        }
        // SAFETY: neither call has effects.
        let (pid, tid) = unsafe {
            (
                entry::raw(&Call::new(libc::SYS_getpid, &[])) as i32,
                entry::raw(&Call::new(libc::SYS_gettid, &[])) as i32,
            )
        };
        let [a, b, c] = [call.args[0] as i32, call.args[1] as i32, call.args[2] as i32];
        match nr {
            libc::SYS_kill => (a, b) == (pid, libc::SIGKILL),
            libc::SYS_tkill => (a, b) == (tid, libc::SIGKILL),
            _ => (a, b, c) == (pid, tid, libc::SIGKILL),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Machine, in_child};

    fn is_open(fd: i32) -> bool {
        // SAFETY: asks about a descriptor.
        unsafe { libc::fcntl(fd, libc::F_GETFD) != -1 }
    }

    #[test]
    fn the_guest_can_neither_close_nor_meet_it() {
        let status = in_child(|| {
            let mut m = Machine::start();
            *m.system.process.report() = Some(Report::new());
            let own = m.system.report_to().expect("a report");
            let fd = own as u64;
            let bad = -i64::from(libc::EBADF);
            assert!(own >= LOWEST as i32 && is_open(own));
            assert_eq!(m.result(libc::SYS_close, &[fd]), bad);
            assert_eq!(m.result(libc::SYS_dup2, &[fd, 1]), bad);
            assert_eq!(m.result(libc::SYS_dup2, &[1, fd - 1]), own as i64 - 1);
            assert_eq!(m.result(libc::SYS_dup2, &[1, fd + 1]), own as i64 + 1);
            assert_eq!(m.result(libc::SYS_close_range, &[fd - 1, u32::MAX.into(), 0]), 0);
            assert!(is_open(own) && !is_open(own - 1) && !is_open(own + 1));
            assert_eq!(m.result(libc::SYS_close_range, &[fd, fd, 0]), 0);
            assert!(is_open(own));
            assert_eq!(m.result(libc::SYS_dup2, &[1, fd]), own as i64);
            let moved = m.system.report_to().expect("a report");
            assert!(moved != own && is_open(moved) && is_open(own));
            assert_eq!(m.result(libc::SYS_close, &[fd]), 0);
            *m.system.process.report() = None;
            assert!(!is_open(moved));
            0
        });
        assert_eq!(status, 0);
    }

    #[test]
    fn only_its_own_certain_death_is_announced() {
        let status = in_child(|| {
            let m = Machine::start();
            *m.system.process.report() = Some(Report::new());
            let own = u64::from(std::process::id());
            let ends =
                |m: &Machine, nr, args: &[u64]| m.system.is_own_end(nr, &Call::new(nr, args));
            assert!(ends(&m, libc::SYS_kill, &[own, 9]) && ends(&m, libc::SYS_tkill, &[own, 9]));
            assert!(ends(&m, libc::SYS_tgkill, &[own, own, 9]));
            assert!(!ends(&m, libc::SYS_kill, &[own, 15]) && !ends(&m, libc::SYS_kill, &[0, 9]));
            assert!(
                !ends(&m, libc::SYS_kill, &[1, 9]) && !ends(&m, libc::SYS_tgkill, &[own, 1, 9])
            );
            *m.system.process.report() = None;
            assert!(!ends(&m, libc::SYS_kill, &[own, 9]));
            0
        });
        assert_eq!(status, 0);
    }
}
