//! 32-bit calls about signals, and calls that wait with a signal mask: [`System`] emulates both.
//!
//! The emulation reads and writes 64-bit structures. So each function copies the guest's 32-bit
//! structure into a 64-bit one in host memory, makes the 64-bit call, and copies the result back.
//! A 32-bit signal set has the bytes of a 64-bit one. The oldest calls have only the first 32
//! signals.
//!
//! A handler that is set by a 32-bit call gets a 32-bit signal frame, for code in a 32-bit segment.
//! The translator runs no such code, so these calls can set only SIG_DFL and SIG_IGN.
//!
//! No data; the functions run on the guest's thread and take the locks of the 64-bit calls only.
//!
//! Example: `ppoll` (309) converts the 32-bit timeout, makes the 64-bit `ppoll` with the guest's
//! descriptors and mask, and writes what is left of the timeout.

use dynasour_guest::ThreadContext;

use super::files::handlers;
use super::{done, refuse, word, words, write_words};
use crate::kernel::entry::Call;
use crate::kernel::process::guest_access::{guest_read, guest_write};
use crate::kernel::process::{Done, Engine, System};
use crate::kernel::signal::{MAX_SIGNAL, SIG_IGN, SigSet};

/// The size of a signal set in bytes.
const SET_SIZE: u64 = 8;
/// Why a handler cannot be set.
const FRAMES: &str = "a handler set by a 32-bit call would get a 32-bit signal frame";

/// A signal's action as the four words of the 64-bit structure: handler, flags, restorer, mask.
type Action = [u64; 4];

/// The layout of a timeout in guest memory.
#[derive(Clone, Copy)]
enum Time {
    /// Seconds and nanoseconds of 32 bits each (`struct old_timespec32`).
    Words,
    /// Seconds and nanoseconds of 64 bits each (`struct __kernel_timespec`).
    Long,
}

/// The timeout at `address`: seconds and nanoseconds. The error is an errno.
fn timeout(address: u64, time: Time) -> Result<[i64; 2], i32> {
    match time {
        Time::Words => words(address).map(|pair| pair.map(|word| i64::from(word as i32))),
        Time::Long => Ok([
            i64::from_le_bytes(guest_read(address)?),
            i64::from_le_bytes(guest_read(address + 8)?),
        ]),
    }
}

/// Writes the remaining time of a timeout. A failure is ignored, as the kernel ignores it.
fn put_timeout(address: u64, time: Time, [seconds, nanoseconds]: [i64; 2]) {
    let _ = match time {
        Time::Words => write_words(address, &[seconds as u32, nanoseconds as u32]),
        Time::Long => {
            guest_write(address, [seconds.to_le_bytes(), nanoseconds.to_le_bytes()].as_flattened())
        }
    };
}

/// Converts a siginfo to the 32-bit layout (`struct compat_siginfo`), in which pointers and times
/// have 4 bytes and the fields behind `si_code` have no padding before them.
fn siginfo_32(long: &[u8; 128]) -> [u8; 128] {
    const SI_TIMER: i32 = -2;
    const SI_SIGIO: i32 = -5;
    const SI_KERNEL: i32 = 0x80;
    let mut short = [0; 128];
    let field = |at: usize| i32::from_le_bytes(*long[at..].first_chunk().expect("in the array"));
    let (signo, code) = (field(0), field(8));
    // Offsets of 4-byte fields: in the 64-bit layout, in the 32-bit layout.
    let moved: &[(usize, usize)] = if (1..SI_KERNEL).contains(&code) {
        match signo {
            libc::SIGILL | libc::SIGFPE | libc::SIGSEGV | libc::SIGBUS | libc::SIGTRAP => {
                &[(16, 12), (24, 16)]
            }
            libc::SIGCHLD => &[(16, 12), (20, 16), (24, 20), (32, 24), (40, 28)],
            libc::SIGSYS => &[(16, 12), (24, 16), (28, 20)],
            // SIGPOLL
            _ => &[(16, 12), (24, 16)],
        }
    } else {
        match code {
            SI_TIMER => &[(16, 12), (20, 16), (24, 20)],
            SI_SIGIO => &[(16, 12), (24, 16)],
            code if code < 0 => &[(16, 12), (20, 16), (24, 20)],
            // Sent by kill, or by the kernel.
            _ => &[(16, 12), (20, 16)],
        }
    };
    short[..12].copy_from_slice(&long[..12]);
    for &(from, to) in moved {
        short[to..to + 4].copy_from_slice(&long[from..from + 4]);
    }
    short
}

impl System {
    /// Sets the action of a signal if there is a new one, and returns the previous action. `Err`:
    /// how the call ended without success.
    fn set_action_32(
        &mut self,
        engine: &mut dyn Engine,
        call: &Call,
        new: Option<Action>,
    ) -> Result<Action, Done> {
        let signo = call.args[0];
        let is_signal = (1..=MAX_SIGNAL).contains(&(signo as i32));
        if is_signal && new.is_some_and(|[handler, ..]| handler > SIG_IGN) {
            return Err(refuse(call.nr as u32, "sigaction with a handler", FRAMES));
        }
        let mut old: Action = [0; 4];
        let new_address = new.as_ref().map_or(0, |new| new.as_ptr() as u64);
        let args = [signo, new_address, old.as_mut_ptr() as u64, SET_SIZE];
        match self.rt_sigaction(engine, &Call::new(libc::SYS_rt_sigaction, &args)) {
            Done::Value(0) => Ok(old),
            done => Err(done),
        }
    }

    /// Sets the thread's signal mask to `mask`.
    fn set_mask(&mut self, context: &ThreadContext, mask: SigSet) -> Done {
        let set = std::ptr::from_ref(&mask) as u64;
        let args = [libc::SIG_SETMASK as u64, set, 0, SET_SIZE];
        self.rt_sigprocmask(context, &Call::new(libc::SYS_rt_sigprocmask, &args))
    }

    /// `rt_sigtimedwait`
    fn sigtimedwait_32(&mut self, call: &Call, time: Time) -> Result<Done, i32> {
        let [set, out, limit, size, ..] = call.args;
        if size != SET_SIZE {
            return Err(libc::EINVAL);
        }
        let set: SigSet = u64::from_le_bytes(guest_read(set)?);
        let limit = if limit == 0 { None } else { Some(timeout(limit, time)?) };
        let mut info = [0u8; 128];
        let args = [
            std::ptr::from_ref(&set) as u64,
            if out == 0 { 0 } else { info.as_mut_ptr() as u64 },
            limit.as_ref().map_or(0, |limit| limit.as_ptr() as u64),
            SET_SIZE,
        ];
        let done = self.rt_sigtimedwait(&Call::new(libc::SYS_rt_sigtimedwait, &args));
        if out != 0 && matches!(done, Done::Value(1..)) {
            guest_write(out, &siginfo_32(&info))?;
        }
        Ok(done)
    }

    /// `pselect6`, whose sixth argument is a pair of 32-bit words: a mask's address and size.
    fn pselect6_32(
        &mut self,
        context: &mut ThreadContext,
        engine: &mut dyn Engine,
        call: &Call,
        time: Time,
    ) -> Result<Done, i32> {
        let [count, sets @ .., limit, pair] = call.args;
        let [mask, size] = if pair == 0 { [0, 0] } else { words(pair)? };
        if mask == 0 {
            return Ok(self.pass_32(engine, call));
        }
        let mut left = if limit == 0 { None } else { Some(timeout(limit, time)?) };
        // A 32-bit call reads and writes the sets in words of 4 bytes, the 64-bit call in words of
        // 8 bytes. The 64-bit call would access up to 4 bytes behind the guest's sets, so it gets
        // copies. Descriptors that the process cannot have are ignored, as by the kernel.
        let count = count as i32;
        if count < 0 {
            return Err(libc::EINVAL);
        }
        let count = count.min(most_descriptors());
        let bytes = 4 * (count as usize).div_ceil(32);
        let mut copies = [const { Vec::<u64>::new() }; 3];
        for (copy, &set) in copies.iter_mut().zip(&sets) {
            if set != 0 {
                copy.resize(bytes.div_ceil(8).max(1), 0);
                let mut read = vec![0; bytes];
                if crate::memory::copy_in(set, &mut read) != bytes {
                    return Err(libc::EFAULT);
                }
                for (word, part) in copy.iter_mut().zip(read.chunks(8)) {
                    let mut whole = [0; 8];
                    whole[..part.len()].copy_from_slice(part);
                    *word = u64::from_le_bytes(whole);
                }
            }
        }
        let pair = [u64::from(mask), u64::from(size)];
        let [read, write, except] = copies.each_mut().map(|copy| match copy.is_empty() {
            true => 0,
            false => copy.as_mut_ptr() as u64,
        });
        let left_address = left.as_mut().map_or(0, |left| left.as_mut_ptr() as u64);
        let args = [count as u64, read, write, except, left_address, pair.as_ptr() as u64];
        let done = self.perform_64(context, engine, libc::SYS_pselect6, &args);
        if done == Done::Restart {
            return Ok(done);
        }
        if let Some(left) = left {
            put_timeout(limit, time, left);
        }
        if matches!(done, Done::Value(0..)) {
            for (copy, &set) in copies.iter().zip(&sets).filter(|(copy, _)| !copy.is_empty()) {
                let written: Vec<u8> = copy.iter().flat_map(|word| word.to_le_bytes()).collect();
                guest_write(set, &written[..bytes])?;
            }
        }
        Ok(done)
    }
}

/// The size of the process's descriptor table. The kernel ignores the rest of a set.
fn most_descriptors() -> i32 {
    /// A number of descriptors, for a process without `/proc`: the default of `fs.nr_open` (Linux,
    /// fs/file.c). The descriptors above it in a longer set are ignored.
    const MOST: i32 = 1 << 20;
    let status = std::fs::read_to_string("/proc/thread-self/status").unwrap_or_default();
    let size = status.lines().find_map(|line| line.strip_prefix("FDSize:"));
    size.and_then(|size| size.trim().parse().ok()).unwrap_or(MOST)
}

handlers! {
    signal: |system, _context, engine, call| {
        const ONCE: u64 = 0x8000_0000;
        const UNMASKED: u64 = 0x4000_0000;
        let new = [call.args[1], ONCE | UNMASKED, 0, 0];
        match system.set_action_32(engine, call, Some(new)) {
            Ok([handler, ..]) => Done::Value(handler as i64),
            Err(done) => done,
        }
    };
    sigaction: |system, _context, engine, call| {
        let [_, new, old, ..] = call.args;
        done((|| {
            let new = match new {
                0 => None,
                at => {
                    let [handler, mask, flags, restorer] = words(at)?.map(u64::from);
                    Some([handler, flags, restorer, mask])
                }
            };
            let before = match system.set_action_32(engine, call, new) {
                Ok([handler, flags, restorer, mask]) => [handler, mask, flags, restorer],
                Err(done) => return Ok(done),
            };
            if old != 0 {
                write_words(old, &before.map(|word| word as u32))?;
            }
            Ok(Done::Value(0))
        })())
    };
    rt_sigaction: |system, _context, engine, call| {
        let [_, new, old, size, ..] = call.args;
        done((|| {
            if size != SET_SIZE {
                return Err(libc::EINVAL);
            }
            let new = match new {
                0 => None,
                at => {
                    let [handler, flags, restorer, low, high] = words(at)?.map(u64::from);
                    Some([handler, flags, restorer, low | high << 32])
                }
            };
            match system.set_action_32(engine, call, new) {
                Ok([handler, flags, restorer, mask]) if old != 0 => {
                    let words = [handler, flags, restorer, mask, mask >> 32];
                    write_words(old, &words.map(|word| word as u32))?;
                    Ok(Done::Value(0))
                }
                Ok(_) => Ok(Done::Value(0)),
                Err(done) => Ok(done),
            }
        })())
    };
    sigprocmask: |system, context, _engine, call| {
        const LOW: u64 = u32::MAX as u64;
        let [how, new, old, ..] = call.args;
        done((|| {
            let before = system.mask;
            if new != 0 {
                let set = u64::from(word(new)?);
                let mask = match how as i32 {
                    libc::SIG_BLOCK => before | set,
                    libc::SIG_UNBLOCK => before & !set,
                    libc::SIG_SETMASK => before & !LOW | set,
                    _ => return Err(libc::EINVAL),
                };
                let done = system.set_mask(context, mask);
                if done != Done::Value(0) {
                    return Ok(done);
                }
            }
            if old != 0 {
                write_words(old, &[before as u32])?;
            }
            Ok(Done::Value(0))
        })())
    };
    sgetmask: |system, _context, _engine, _call| Done::Value(system.mask as i64);
    ssetmask: |system, context, _engine, call| {
        let before = i64::from(system.mask as i32);
        // The kernel extends the sign into the upper half of the set.
        match system.set_mask(context, i64::from(call.args[0] as i32) as u64) {
            Done::Value(0) => Done::Value(before),
            done => done,
        }
    };
    sigpending: |system, _context, _engine, call| {
        let mut pending: SigSet = 0;
        let args = [std::ptr::from_mut(&mut pending) as u64, SET_SIZE];
        match system.rt_sigpending(&Call::new(libc::SYS_rt_sigpending, &args)) {
            Done::Value(0) => write_words(call.args[0], &[pending as u32])
                .map_or_else(Done::error, |()| Done::Value(0)),
            done => done,
        }
    };
    sigsuspend: |system, context, _engine, call| {
        let set: SigSet = call.args[2];
        let args = [std::ptr::from_ref(&set) as u64, SET_SIZE];
        system.rt_sigsuspend(context, &Call::new(libc::SYS_rt_sigsuspend, &args))
    };
    sigaltstack: |system, context, _engine, call| {
        let [new, old, ..] = call.args;
        done((|| {
            // The 32-bit structure has an address, flags and a size, of 4 bytes each.
            let stack = match new {
                0 => None,
                at => Some(words::<3>(at)?.map(u64::from)),
            };
            let mut before = [0u64; 3];
            let stack_address = stack.as_ref().map_or(0, |stack| stack.as_ptr() as u64);
            let args = [stack_address, before.as_mut_ptr() as u64];
            let done = system.sigaltstack(context, &Call::new(libc::SYS_sigaltstack, &args));
            if done == Done::Value(0) && old != 0 {
                write_words(old, &before.map(|word| word as u32))?;
            }
            Ok(done)
        })())
    };
    rt_sigtimedwait: |system, _context, _engine, call| {
        done(system.sigtimedwait_32(call, Time::Words))
    };
    rt_sigtimedwait_time64: |system, _context, _engine, call| {
        done(system.sigtimedwait_32(call, Time::Long))
    };
    ppoll: |system, context, engine, call| {
        let [list, count, limit, mask, size, _] = call.args;
        if mask == 0 {
            return system.pass_32(engine, call);
        }
        done((|| {
            let mut left =
                if limit == 0 { None } else { Some(timeout(limit, Time::Words)?) };
            let left_address = left.as_mut().map_or(0, |left| left.as_mut_ptr() as u64);
            let args = [list, count, left_address, mask, size];
            let done = system.perform_64(context, engine, libc::SYS_ppoll, &args);
            if let (Some(left), true) = (left, done != Done::Restart) {
                put_timeout(limit, Time::Words, left);
            }
            Ok(done)
        })())
    };
    pselect6: |system, context, engine, call| {
        done(system.pselect6_32(context, engine, call, Time::Words))
    };
    pselect6_time64: |system, context, engine, call| {
        done(system.pselect6_32(context, engine, call, Time::Long))
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn siginfo_is_narrowed_field_by_field() {
        let mut long = [0u8; 128];
        let mut set =
            |at: usize, value: i32| long[at..at + 4].copy_from_slice(&value.to_le_bytes());
        let fields = [(0, libc::SIGCHLD), (8, 1), (16, 42), (20, 1000), (24, 7), (32, 5), (40, 6)];
        fields.iter().for_each(|&(at, value)| set(at, value));
        let short = siginfo_32(&long);
        let words: Vec<i32> = short
            .chunks_exact(4)
            .map(|word| i32::from_le_bytes(word.try_into().expect("four bytes")))
            .collect();
        assert_eq!(words[..9], [libc::SIGCHLD, 0, 1, 42, 1000, 7, 5, 6, 0]);
    }
}
