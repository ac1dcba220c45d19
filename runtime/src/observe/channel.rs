//! A way for messages from a guest's process to the process that has started it, without a descriptor.
//!
//! Data: a ring of bytes in a shared mapping, made by [`channel`] before the fork. One process has the
//! [`Sender`], the other the [`Receiver`]; the positions only grow, and are taken modulo the ring's size.
//!
//! ```text
//!   written ──────────────► advanced by the sender only, after the bytes are there
//!   read    ──────────────► advanced by the receiver only, after it has copied them
//!   is_closed               set once, by a receiver that goes away; then the sender drops what it is given
//! ```
//!
//! Invariants: no message is lost or torn while the receiver is there: a sender that finds the ring full waits. It
//! waits in slices of [`SLICE`], and gives up if the receiver's process is gone, so that a guest outlives a killed
//! host. A message is a length and that many bytes, and may be longer than the ring. One thread at a time sends
//! ([`super::events`] has the lock). Whoever maps the ring must treat it as its own memory, never as the guest's:
//! it is mapped before [`System::protect_host`](crate::kernel::process::System::protect_host) looks.
//!
//! Example: the sender writes `[3,0,0,0,a,b,c]` and advances `written` by 7; the receiver, which waits on the futex
//! `news`, copies the seven bytes, advances `read`, and returns `[a,b,c]`.

use crate::host_call::{Call, raw};
use std::io;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

/// Bytes of the ring (guess: some thousand messages; too few make the guest wait for the receiver).
const RING: usize = 256 << 10;

/// How long a process waits at a time before it looks whether the other one is still there (guess).
const SLICE: Duration = Duration::from_millis(100);

/// What the processes share.
#[repr(C)]
struct Shared {
    /// Bytes written so far.
    written: AtomicU64,
    /// Bytes read so far.
    read: AtomicU64,
    /// A futex of the receiver's, changed after `written`.
    news: AtomicU32,
    /// A futex of the sender's, changed after `read`.
    room: AtomicU32,
    /// 1: the receiver reads no more.
    is_closed: AtomicU32,
    ring: [u8; RING],
}

/// A shared anonymous mapping of a `T` that all-zero bytes are a value of.
pub(super) struct Mapping<T>(NonNull<T>);

// SAFETY: a mapping may be used and unmapped by any thread; what is in it is only reached as `&T` and, in the ring,
// by the protocol of the module.
unsafe impl<T: Sync> Send for Mapping<T> {}
// SAFETY: as above.
unsafe impl<T: Sync> Sync for Mapping<T> {}

impl<T> Mapping<T> {
    /// A new mapping, filled with zeros.
    ///
    /// # Safety
    /// Zeros are a value of `T`.
    pub(super) unsafe fn zeroed() -> io::Result<Mapping<T>> {
        let (prot, flags) =
            (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_ANONYMOUS);
        // SAFETY: a new mapping.
        let at = unsafe { libc::mmap(std::ptr::null_mut(), size_of::<T>(), prot, flags, -1, 0) };
        match NonNull::new(at.cast()).filter(|_| at != libc::MAP_FAILED) {
            Some(at) => Ok(Mapping(at)),
            None => Err(io::Error::last_os_error()),
        }
    }
}

impl<T> std::ops::Deref for Mapping<T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: mapped until `drop`, and a value of `T` since `zeroed`.
        unsafe { self.0.as_ref() }
    }
}

impl<T> Drop for Mapping<T> {
    fn drop(&mut self) {
        // SAFETY: mapped by `zeroed`; nothing refers to it any more.
        unsafe { libc::munmap(self.0.as_ptr().cast(), size_of::<T>()) };
    }
}

impl Mapping<Shared> {
    /// The address of the ring's byte at `position`, and how many bytes are there before its end.
    fn at(&self, position: u64) -> (*mut u8, usize) {
        let offset = (position % RING as u64) as usize;
        // SAFETY: within the mapping.
        (unsafe { (&raw mut (*self.0.as_ptr()).ring).cast::<u8>().add(offset) }, RING - offset)
    }
}

/// Waits until the futex is no longer `seen`, at most for `time`.
fn wait(futex: &AtomicU32, seen: u32, time: Duration) {
    let time =
        libc::timespec { tv_sec: time.as_secs() as i64, tv_nsec: i64::from(time.subsec_nanos()) };
    let args =
        [futex.as_ptr() as u64, libc::FUTEX_WAIT as u64, seen.into(), &raw const time as u64];
    // SAFETY: waits; the futex and the time are there meanwhile.
    unsafe { raw(&Call::new(libc::SYS_futex, &args)) };
}

/// Changes the futex and wakes whoever waits.
fn signal(futex: &AtomicU32) {
    futex.fetch_add(1, Ordering::Release);
    let args = [futex.as_ptr() as u64, libc::FUTEX_WAKE as u64, 1];
    // SAFETY: wakes; the futex is there.
    unsafe { raw(&Call::new(libc::SYS_futex, &args)) };
}

/// The two ends of a new channel, both in this process, which is that of the receiver.
///
/// # Errors
/// There is no memory for it.
pub fn channel() -> io::Result<(Sender, Receiver)> {
    // SAFETY: numbers and bytes.
    let shared = Arc::new(unsafe { Mapping::<Shared>::zeroed() }?);
    let sender = Sender { shared: shared.clone(), receiver: std::process::id() };
    Ok((sender, Receiver { shared, bytes: Vec::new() }))
}

/// The end in the guest's process.
pub struct Sender {
    shared: Arc<Mapping<Shared>>,
    /// The process of the receiver.
    receiver: u32,
}

/// The receiver reads no more.
#[derive(Debug, PartialEq, Eq)]
pub struct Gone;

impl Sender {
    /// Sends a message; waits while the ring is full.
    ///
    /// # Errors
    /// The receiver reads no more. Part of the message may have been written.
    pub fn send(&mut self, message: &[u8]) -> Result<(), Gone> {
        let length = u32::try_from(message.len()).map_err(|_| Gone)?;
        self.write(&length.to_le_bytes())?;
        self.write(message)?;
        signal(&self.shared.news);
        Ok(())
    }

    fn write(&mut self, mut bytes: &[u8]) -> Result<(), Gone> {
        let shared = &self.shared;
        while !bytes.is_empty() {
            if shared.is_closed.load(Ordering::Acquire) != 0 {
                return Err(Gone);
            }
            let seen = shared.room.load(Ordering::Acquire);
            let written = shared.written.load(Ordering::Relaxed);
            let room = RING as u64 - (written - shared.read.load(Ordering::Acquire));
            let (to, until_end) = shared.at(written);
            let len = bytes.len().min(room as usize).min(until_end);
            if len == 0 {
                signal(&shared.news);
                wait(&shared.room, seen, SLICE);
                if !self.has_receiver() {
                    return Err(Gone);
                }
                continue;
            }
            // SAFETY: the receiver reads none of these bytes before `written` has advanced over them.
            unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, len) };
            shared.written.store(written + len as u64, Ordering::Release);
            bytes = &bytes[len..];
        }
        Ok(())
    }

    /// Is the receiver's process there?
    fn has_receiver(&self) -> bool {
        // SAFETY: signal 0 only asks.
        let answer = unsafe { raw(&Call::new(libc::SYS_kill, &[self.receiver.into(), 0])) };
        answer != -i64::from(libc::ESRCH)
    }
}

/// The end in the process that has started the guest.
pub struct Receiver {
    shared: Arc<Mapping<Shared>>,
    /// What was read of messages that are not complete yet.
    bytes: Vec<u8>,
}

impl Receiver {
    /// The messages that are complete, in order; waits at most for `time` if there is nothing new.
    pub fn receive(&mut self, time: Duration) -> Vec<Vec<u8>> {
        let seen = self.shared.news.load(Ordering::Acquire);
        if !self.take() {
            wait(&self.shared.news, seen, time);
            self.take();
        }
        let mut messages = Vec::new();
        let mut rest = &self.bytes[..];
        while let Some((length, after)) = rest.split_first_chunk() {
            let length = u32::from_le_bytes(*length) as usize;
            let Some((message, after)) = after.split_at_checked(length) else { break };
            messages.push(message.to_vec());
            rest = after;
        }
        let left = rest.len();
        self.bytes.drain(..self.bytes.len() - left);
        messages
    }

    /// Copies what is in the ring; is there anything?
    fn take(&mut self) -> bool {
        let shared = &self.shared;
        let (mut read, written) =
            (shared.read.load(Ordering::Relaxed), shared.written.load(Ordering::Acquire));
        // The guest's process is not trusted to keep the positions right.
        let mut rest = written.wrapping_sub(read).min(RING as u64) as usize;
        if rest == 0 {
            return false;
        }
        while rest > 0 {
            let (from, until_end) = shared.at(read);
            let len = rest.min(until_end);
            // SAFETY: the sender has written these bytes, and writes there again only after `read` has
            // advanced over them.
            self.bytes.extend_from_slice(unsafe { std::slice::from_raw_parts(from, len) });
            read += len as u64;
            rest -= len;
        }
        shared.read.store(read, Ordering::Release);
        signal(&shared.room);
        true
    }
}

impl Drop for Receiver {
    fn drop(&mut self) {
        self.shared.is_closed.store(1, Ordering::Release);
        signal(&self.shared.room);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::in_child;

    /// Messages of many lengths, some longer than the ring.
    fn message(n: usize) -> Vec<u8> {
        let len = if n.is_multiple_of(97) { RING + 3 * n } else { n * 31 % 700 };
        (0..len).map(|i| (i * 7 + n) as u8).collect()
    }

    #[test]
    fn no_message_is_lost_or_torn() {
        let (mut sender, mut receiver) = channel().expect("memory");
        let sending = std::thread::spawn(move || {
            (0..1000).for_each(|n| sender.send(&message(n)).expect("a receiver"));
        });
        let mut got = 0;
        while got < 1000 {
            for received in receiver.receive(SLICE) {
                assert!(received == message(got), "message {got}");
                got += 1;
            }
        }
        sending.join().expect("sent");
        assert_eq!(receiver.receive(Duration::ZERO), Vec::<Vec<u8>>::new());
    }

    #[test]
    fn a_receiver_that_goes_away_lets_the_sender_go_on() {
        let (mut sender, receiver) = channel().expect("memory");
        sender.send(b"one").expect("a receiver");
        let full = std::thread::spawn(move || {
            let all = std::iter::repeat_with(|| sender.send(&[0; 1000]));
            (all.take(1000).filter(Result::is_err).count(), sender)
        });
        std::thread::sleep(Duration::from_millis(20));
        drop(receiver);
        let (refused, mut sender) = full.join().expect("not stuck");
        assert!(refused > 500, "{refused}");
        assert_eq!(sender.send(b"two"), Err(Gone));
    }

    #[test]
    fn a_killed_receiver_is_noticed() {
        let status = in_child(|| {
            let (mut sender, receiver) = channel().expect("memory");
            // SAFETY: the child only ends.
            let gone = unsafe { libc::fork() };
            if gone == 0 {
                // SAFETY: ends the process.
                unsafe { libc::_exit(0) };
            }
            // SAFETY: waits for the child.
            unsafe { libc::waitpid(gone, std::ptr::null_mut(), 0) };
            sender.receiver = gone as u32;
            let refused = (0..1000).any(|_| sender.send(&[0; 1000]).is_err());
            drop(receiver);
            i32::from(!refused)
        });
        assert_eq!(status, 0);
    }
}
