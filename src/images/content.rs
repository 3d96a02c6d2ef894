//! What tells the content of a file from another's of its size, where that is quick to say. On another machine, files were installed at another time.

use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use vramctl_store::Hash;

/// A hash of more takes too long while the program waits.
const LARGEST: u64 = 4 << 20;

/// A library's or program's build id, else the hash of a small file. `None` for what is neither, or cannot be read.
pub fn of(path: &Path) -> Option<String> {
    // Whoever owns it may have put anything in its place meanwhile.
    let file = File::options().read(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(path).ok()?;
    if !file.metadata().ok()?.is_file() {
        return None;
    }
    build_id(&file).ok().flatten().or_else(|| hash(&file).ok().flatten())
}

fn hash(file: &File) -> io::Result<Option<String>> {
    let bytes = file.metadata()?.len();
    if bytes > LARGEST {
        return Ok(None);
    }
    let mut whole = vec![0; bytes as usize];
    file.read_exact_at(&mut whole, 0)?;
    Ok(Some(format!("blake3 {}", Hash::of(&whole))))
}

/// That of a 64-bit ELF file with the order of bytes of this machine: what the linker has made of all that is in there.
fn build_id(file: &File) -> io::Result<Option<String>> {
    const NOTES: u32 = 4;
    const BUILD_ID: u32 = 3;
    const LONGEST: u64 = 64 << 10;
    let mut header = [0; 64];
    file.read_exact_at(&mut header, 0)?;
    if !header.starts_with(b"\x7fELF\x02") {
        return Ok(None);
    }
    let (table, size, count) = (long(&header, 32), u64::from(short(&header, 54)), u64::from(short(&header, 56)));
    for place in 0..count {
        let mut segment = [0; 56];
        file.read_exact_at(&mut segment, table.saturating_add(place * size))?;
        if word(&segment, 0) != NOTES {
            continue;
        }
        let mut notes = vec![0; long(&segment, 32).min(LONGEST) as usize];
        file.read_exact_at(&mut notes, long(&segment, 8))?;
        // Each: the lengths of its name and its text, its kind, and both, filled up to whole words.
        let mut rest = &notes[..];
        while rest.len() > 12 {
            let [name, text, kind] = [0, 4, 8].map(|at| word(rest, at));
            let [name_end, text_begin] = [12 + name as usize, 12 + (name as usize).next_multiple_of(4)];
            let text_end = text_begin + text as usize;
            if rest.len() < text_end {
                break;
            }
            if kind == BUILD_ID && &rest[12..name_end] == b"GNU\0" {
                let digits = rest[text_begin..text_end].iter().map(|byte| format!("{byte:02x}"));
                return Ok(Some(format!("build id {}", digits.collect::<Vec<_>>().concat())));
            }
            rest = rest.get((text_begin + (text as usize).next_multiple_of(4))..).unwrap_or_default();
        }
    }
    Ok(None)
}

fn short(bytes: &[u8], at: usize) -> u16 {
    u16::from_ne_bytes([bytes[at], bytes[at + 1]])
}

fn word(bytes: &[u8], at: usize) -> u32 {
    u32::from_ne_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

fn long(bytes: &[u8], at: usize) -> u64 {
    u64::from(word(bytes, at)) | u64::from(word(bytes, at + 4)) << 32
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    #[cfg_attr(miri, ignore = "reads files")]
    fn a_library_has_its_build_id_and_a_small_file_its_hash() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        let written = |content: &[u8]| {
            fs::write(&path, content).unwrap();
            of(&path)
        };
        let [one, other] = [written(b"one"), written(b"two")];
        assert!(one.as_ref().is_some_and(|one| one.starts_with("blake3 ")) && one != other);
        assert_eq!(written(b"one"), one);
        assert_eq!(written(&vec![0; LARGEST as usize + 1]), None);
        assert_eq!(of(&folder.path().join("none")), None);
        // The C library of any distribution has one.
        let maps = fs::read_to_string("/proc/self/maps").unwrap();
        let library = maps.lines().find_map(|line| line.find('/').map(|at| &line[at..]).filter(|path| path.contains("/libc.so"))).unwrap();
        let id = of(Path::new(library)).unwrap();
        assert!(id.starts_with("build id ") && id.len() > 24, "{id}");
        // Cut anywhere, or with a table that is nowhere, it is no reason to panic.
        let whole = fs::read(library).unwrap();
        for length in (0..4096).step_by(61) {
            written(&whole[..length]);
        }
        written(&[&whole[..32], &[0xff; 8], &whole[40..4096]].concat());
    }
}
