//! The descriptor to which a process writes its report when it ends, and the system calls of the
//! guest that must not close it.
//!
//! Programs close their standard error before they end (coreutils do). So the report goes to a
//! duplicate of the descriptor that the process began with. The guest does not see the duplicate:
//! closing its number fails with EBADF, and a `dup2` onto its number moves it to another one. A
//! process that reports nothing, or files only, has no such descriptor, and neither have its children.
//!
//! Data: [`Report`], behind the lock of `Process::report`; processes that share descriptors share
//! it. The lock is not held during the guest's own call.
//!
//! Example: the duplicate is descriptor 200. The guest's `close_range(3, !0, 0)` is made as two
//! calls, 3 to 199 and 201 to !0.

use super::{Done, System};
use crate::kernel::entry::{self, Call};

/// The lowest number of the duplicate (guess). Programs expect that new descriptors get low
/// numbers; a number within their reach would be skipped.
const LOWEST: u64 = 200;

/// What a process reports when it ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Reports {
    /// Nothing.
    Nothing,
    /// Files, which are opened at the end. That they cannot be written is not said, because the guest's
    /// standard error may be anything then; so who asks for files tries to open them before.
    Files,
    /// Text on the standard error that the process began with, and perhaps files.
    Text,
}

/// The descriptor for the report of one process.
#[derive(Debug)]
pub(crate) struct Report {
    fd: i32,
}

impl Report {
    /// Duplicates the present standard error, if text is reported. If it is closed, there is no
    /// descriptor for the report.
    pub(crate) fn new(reports: Reports) -> Option<Report> {
        match reports {
            Reports::Nothing => None,
            Reports::Files => Some(Report { fd: -1 }),
            Reports::Text => Some(Report { fd: duplicate(libc::STDERR_FILENO) }),
        }
    }

    /// The descriptor; negative if there is none.
    pub(crate) fn descriptor(&self) -> i32 {
        self.fd
    }

    fn is(&self, fd: i32) -> bool {
        fd >= 0 && fd == self.fd
    }

    /// Moves the descriptor to another number, because the guest is about to use the present one.
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
    // SAFETY: makes a new descriptor of the host's.
    let high = unsafe { entry::raw(&call(LOWEST)) } as i32;
    // If the limit on descriptors is lower than that, any number but the standard ones will do.
    // SAFETY: as above.
    if high >= 0 { high } else { unsafe { entry::raw(&call(3)) as i32 } }
}

fn close(fd: i32) {
    if fd >= 0 {
        // SAFETY: the descriptor is the host's own.
        unsafe { entry::raw(&Call::new(libc::SYS_close, &[fd as u64])) };
    }
}

impl System {
    /// Performs `close`, `close_range`, `dup2` and `dup3` so that the report's descriptor survives.
    pub(crate) fn descriptor_call(&self, nr: i64, call: &Call) -> Done {
        let [first, second, flags, ..] = call.args;
        // The guest's call is made after the lock has been released.
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

    /// Whether the call sends SIGKILL to the calling process itself, and the host must act before
    /// it: make a report, or leave locks free in memory that other processes use.
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
            *m.system.process.report() = Report::new(Reports::Text);
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
            *m.system.process.report() = Report::new(Reports::Text);
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
