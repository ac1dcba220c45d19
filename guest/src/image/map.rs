//! Mapping an image's segments at their addresses.
//!
//! The whole address range is reserved first, without replacing anything. Only then are the
//! segments mapped over the reservation. So a failure at any point leaves nothing mapped, and an
//! image never replaces a mapping that exists.

use std::fs::File;
use std::ops::Range;

use nix::errno::Errno;
use nix::sys::mman::{MapFlags, ProtFlags};

use super::Mapped;
use super::error::Reason;
use super::header::{Headers, Segment};
use crate::space::{Reservation, keep_holes_free, page_down, try_low};

/// An image that is mapped, and unmapped again unless committed.
pub(super) struct Image {
    /// What to add to the file's addresses.
    pub(super) bias: u64,
    /// From its first to its last page, holes included.
    pub(super) range: Range<u64>,
    reservations: Vec<Reservation>,
    /// The ranges between segments.
    holes: Vec<Range<u64>>,
}

impl Image {
    /// Maps the segments. A relocatable image is placed low if `low` is set and there is room, else
    /// at an address that the kernel chooses.
    pub(super) fn map(headers: &Headers, file: &File, low: bool) -> Result<Image, Reason> {
        let clusters = headers.page_clusters();
        let (Some(first), Some(last)) = (clusters.first(), clusters.last()) else {
            return Err(Reason::Malformed("no loadable segment".into()));
        };
        let span = first.start..last.end;
        let mut image = if headers.relocatable {
            Image::reserve_anywhere(&span, headers.alignment, low)
                .map_err(cannot_map("image", &span))?
        } else {
            Image::reserve_exactly(&clusters)?
        };
        for segment in &headers.segments {
            image
                .map_segment(segment, file)
                .map_err(cannot_map("segment", &segment.addresses()))?;
        }
        image.holes =
            clusters.windows(2).map(|pair| image.moved(pair[0].end..pair[1].start)).collect();
        keep_holes_free(image.holes.iter().cloned());
        Ok(image)
    }

    /// Unmaps the pages between segments. To be called when everything else has found its place: the
    /// kernel could place it there.
    pub(super) fn unmap_holes(&mut self) -> Result<(), Reason> {
        // Those of an image that must lie at its address are not reserved.
        for hole in &self.holes {
            for reservation in &mut self.reservations {
                if reservation.start() <= hole.start && hole.end <= reservation.end() {
                    reservation.unmap(hole.clone()).map_err(cannot_map("image", hole))?;
                }
            }
        }
        Ok(())
    }

    /// Hands the image over to the guest: it stays mapped.
    pub(super) fn commit(self) -> Mapped {
        self.reservations.into_iter().for_each(Reservation::commit);
        Mapped { range: self.range, load_bias: self.bias }
    }

    fn reserve_exactly(clusters: &[Range<u64>]) -> Result<Image, Reason> {
        let reserve = |pages: &Range<u64>| {
            Reservation::at(pages.start, pages.end - pages.start)
                .map_err(cannot_map("segment", pages))
        };
        let reservations = clusters.iter().map(reserve).collect::<Result<Vec<_>, _>>()?;
        Ok(Image {
            bias: 0,
            range: clusters[0].start..clusters[clusters.len() - 1].end,
            reservations,
            holes: Vec::new(),
        })
    }

    /// Finds room for `span`, moved by a multiple of `align`.
    fn reserve_anywhere(span: &Range<u64>, align: u64, low: bool) -> Result<Image, Errno> {
        let lead = span.start & (align - 1);
        let len = (span.end - span.start).checked_add(lead).ok_or(Errno::ENOMEM)?;
        let at_low =
            if low { try_low(len, align, |start| Reservation::at(start, len)) } else { None };
        let mut reservation = match at_low {
            Some(reserved) => reserved?,
            None => Reservation::anywhere(len, align)?,
        };
        let start = reservation.start() + lead;
        reservation.unmap(reservation.start()..start)?;
        let range = start..reservation.end();
        let bias = start.wrapping_sub(span.start);
        Ok(Image { bias, range, reservations: vec![reservation], holes: Vec::new() })
    }

    fn moved(&self, range: Range<u64>) -> Range<u64> {
        range.start.wrapping_add(self.bias)..range.end.wrapping_add(self.bias)
    }

    /// Maps one segment as the kernel does: the file's pages, zeros to the end of the last of them,
    /// and anonymous pages (always writable) for the rest.
    fn map_segment(&mut self, segment: &Segment, file: &File) -> Result<(), Errno> {
        let file_pages = self.moved(segment.file_pages());
        let pages = self.moved(segment.pages());
        let file_end = segment.address.wrapping_add(segment.file_size).wrapping_add(self.bias);
        let reservation = self
            .reservations
            .iter_mut()
            .find(|reservation| {
                reservation.start() <= pages.start && pages.end <= reservation.end()
            })
            .ok_or(Errno::EFAULT)?;
        if !file_pages.is_empty() {
            reservation.map_file(
                file_pages.clone(),
                segment.prot,
                file,
                page_down(segment.offset),
            )?;
        }
        if segment.memory_size == segment.file_size {
            return Ok(());
        }
        if !file_pages.is_empty() && segment.prot.contains(ProtFlags::PROT_WRITE) {
            // The checked headers say that this page holds bytes of the file,
            // so it is backed and writable.
            reservation.write(file_end, &vec![0; (file_pages.end - file_end) as usize])?;
        }
        if file_pages.end < pages.end {
            let prot = ProtFlags::PROT_READ
                | ProtFlags::PROT_WRITE
                | (segment.prot & ProtFlags::PROT_EXEC);
            reservation.map_zeroed(file_pages.end..pages.end, prot, MapFlags::empty())?;
        }
        Ok(())
    }
}

/// An error that names the segment and its address range.
fn cannot_map(kind: &str, range: &Range<u64>) -> impl FnOnce(Errno) -> Reason {
    let what = format!("{kind} at {:#x}..{:#x}", range.start, range.end);
    move |errno| match errno {
        // The range is in use; of execve's error numbers ENOMEM is the nearest.
        Errno::EEXIST => Reason::CannotMap {
            what: format!("{what} over what is there already"),
            errno: Errno::ENOMEM,
        },
        errno => Reason::CannotMap { what, errno },
    }
}
