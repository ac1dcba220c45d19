//! `shmat`: System V segments of shared memory.
//!
//! No data. The functions run on the guest's thread; `shmat` announces the range that it may
//! replace to [`crate::changes`], so the caller holds no lock.
//!
//! Example: `shmat(id, 0x10000, SHM_REMAP)` of a segment of two pages. The host has no mapping in
//! 0x10000..0x12000, so the code that was translated from there is dropped, and the call is made.

use super::memory::{is_error, pages};
use crate::changes::News;
use crate::kernel::entry::{self, Call};
use crate::kernel::process::{Done, Engine, System};
use dynasour_guest::space::{USER_END, page_down};

impl System {
    /// `shmat`
    pub(super) fn shmat(&mut self, engine: &mut dyn Engine, call: &Call) -> Done {
        let [id, at, flags, ..] = call.args;
        let replaced = if flags as i32 & libc::SHM_REMAP != 0 && at != 0 {
            match segment_size(id) {
                Ok(size) => pages(page_down(at), size),
                Err(error) => return Done::error(error),
            }
        } else {
            0..0
        };
        if !replaced.is_empty() && !self.is_free(engine, &replaced) {
            return Done::error(libc::EINVAL);
        }
        let change = self.process.pages().announce([replaced.clone()]).quiesce(engine);
        let (performed, done) = change.perform(|| self.pass(call));
        if let Done::Value(start) = done
            && !is_error(start)
        {
            // Only the kernel knows the length of the segment. No mapping of the guest's is lost,
            // because the segment's range was unmapped or announced.
            performed.publish(engine, [News::Unknown(start as u64..USER_END)]);
            engine.private_memory_lost();
        } else {
            performed.publish(engine, [News::Unknown(replaced)]);
        }
        done
    }
}

/// The size of the segment of shared memory `id` in bytes.
///
/// # Errors
/// The errno of shmctl(2), with which shmat(2) would fail, too: there is no such segment, or the
/// guest may not read it.
pub(super) fn segment_size(id: u64) -> Result<u64, i32> {
    let mut status = std::mem::MaybeUninit::<libc::shmid_ds>::zeroed();
    let stat =
        Call::new(libc::SYS_shmctl, &[id, libc::IPC_STAT as u64, status.as_mut_ptr() as u64]);
    // SAFETY: the call fills `status` in, or fails; all zeros are a value, too.
    let (result, status) = unsafe { (entry::raw(&stat), status.assume_init()) };
    if result == 0 { Ok(status.shm_segsz as u64) } else { Err(-result as i32) }
}
