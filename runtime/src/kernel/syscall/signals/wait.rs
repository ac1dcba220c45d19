//! The time limit of a `rt_sigtimedwait` that is made again.
//!
//! The kernel wakes a thread for a signal of the six that another thread then takes. The thread
//! goes on to wait for the rest of the time. No lock; the data belongs to the call.
//!
//! Example: a wait of ten seconds is woken after one. The second call is made with nine seconds.

use std::time::{Duration, Instant};

use crate::kernel::entry::Call;
use crate::kernel::process::guest_access::guest_read;

/// A `rt_sigtimedwait` that may be made several times, with the time that is left.
pub(super) struct Wait {
    call: Call,
    /// When the time is over; none if there is no limit, or none that can be read.
    end: Option<Instant>,
    left: libc::timespec,
    again: bool,
}

impl Wait {
    pub(super) fn new(call: &Call) -> Wait {
        let time = match call.args[2] {
            0 => None,
            address => guest_read::<16>(address).ok(),
        };
        let end = time.and_then(|bytes| {
            let [seconds, nanoseconds] = [&bytes[..8], &bytes[8..]].map(super::word);
            let whole = Duration::from_secs(seconds);
            Instant::now().checked_add(whole.checked_add(Duration::from_nanos(nanoseconds))?)
        });
        let left = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        Wait { call: *call, end, left, again: false }
    }

    /// The call to make now.
    pub(super) fn call(&mut self) -> Call {
        let mut call = self.call;
        if self.again && self.end.is_some() {
            call.args[2] = std::ptr::from_ref(&self.left) as u64;
        }
        call
    }

    /// Prepares the call for the rest of the time. False if nothing is left.
    pub(super) fn continues(&mut self) -> bool {
        self.again = true;
        let Some(end) = self.end else { return true };
        let left = end.saturating_duration_since(Instant::now());
        self.left.tv_sec = left.as_secs() as i64;
        self.left.tv_nsec = i64::from(left.subsec_nanos());
        !left.is_zero()
    }
}
