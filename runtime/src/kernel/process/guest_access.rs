//! Reads and writes guest memory for system calls. Errors are errno values, EFAULT for memory that
//! cannot be accessed. No lock: a fault during the access is caught and ends it.

use std::ffi::CString;

/// Reads `N` bytes of guest memory; the error is an errno.
pub(crate) fn guest_read<const N: usize>(address: u64) -> Result<[u8; N], i32> {
    let mut bytes = [0; N];
    if crate::memory::copy_in(address, &mut bytes) == N { Ok(bytes) } else { Err(libc::EFAULT) }
}

/// Writes guest memory; the error is an errno.
pub(crate) fn guest_write(address: u64, bytes: &[u8]) -> Result<(), i32> {
    // SAFETY: the address comes from the guest, which may write its own memory; the write stops
    // where the kernel would report EFAULT.
    if unsafe { crate::changes::host::copy_out(address, bytes) } == bytes.len() {
        Ok(())
    } else {
        Err(libc::EFAULT)
    }
}

/// Reads a string of the guest's of at most `limit` bytes, terminator included; the error is an
/// errno: EFAULT, or `too_long`.
pub(crate) fn guest_string(address: u64, limit: usize, too_long: i32) -> Result<CString, i32> {
    let mut string = Vec::new();
    while string.len() < limit {
        let mut chunk = [0; 256];
        let want = chunk.len().min(limit - string.len());
        let got =
            crate::memory::copy_in(address.wrapping_add(string.len() as u64), &mut chunk[..want]);
        if let Some(end) = chunk[..got].iter().position(|&byte| byte == 0) {
            string.extend_from_slice(&chunk[..end]);
            return CString::new(string).map_err(|_| libc::EFAULT);
        }
        string.extend_from_slice(&chunk[..got]);
        if got < want {
            return Err(libc::EFAULT);
        }
    }
    Err(too_long)
}
