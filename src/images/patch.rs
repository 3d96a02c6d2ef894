//! Changes what CRIU has written of open files: of those that others replace, it must compare neither size nor permissions, nor seek in them, and
//! connections to outside are closed. Reads the names that it has given.
//!
//! `files.img` has two numbers, and then records: a length each, and a message of protocol buffers (`FileEntry`).

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::IpAddr;
use std::path::PathBuf;

/// The fields of the messages.
mod field {
    /// `FileEntry`: its number.
    pub const ID: u64 = 2;
    /// `RemapFilePathEntry`: the numbers of a file, and of the one by which it is found.
    pub const REMAP: [u64; 2] = [1, 2];
    /// `RemapFilePathEntry`: how it is found.
    pub const KIND: u64 = 3;
    /// `FileEntry`: what is known of a plain file.
    pub const PLAIN: u64 = 3;
    /// `FileEntry`: what is known of an Internet socket.
    pub const SOCKET: u64 = 4;
    /// `RegFileEntry`: how it was opened.
    pub const FLAGS: u64 = 2;
    /// `RegFileEntry`: where it was.
    pub const POSITION: u64 = 3;
    /// `RegFileEntry`: its name.
    pub const NAME: u64 = 6;
    /// `RegFileEntry`: its size.
    pub const SIZE: u64 = 8;
    /// `RegFileEntry`: its permissions.
    pub const MODE: u64 = 10;
    /// `FileLockEntry`: the process and the descriptor.
    pub const OWNER: [u64; 2] = [3, 4];
    /// `TtyInfoEntry`: the leader of the session whose terminal it is.
    pub const SESSION: u64 = 6;
    /// `InetSkEntry`: its inode.
    pub const INODE: u64 = 2;
    /// `InetSkEntry`: the state of its connection.
    pub const STATE: u64 = 6;
    /// `InetSkEntry`: the ports here and there, and the addresses.
    pub const ENDS: [u64; 4] = [7, 8, 11, 12];
    /// `InetSkEntry`: which directions have been shut down.
    pub const SHUTDOWN: u64 = 19;
}

/// What the kernel opens nothing of by way of `/proc/self/fd`, as CRIU opens what replaces a file.
const NO_LINKS: u64 = libc::O_NOFOLLOW as u64;

/// Of TCP, in the kernel: no connection.
const CLOSED: u64 = 7;

const HEADER: usize = 8;

/// A field of a message: its number, its value, and all of its bytes.
struct Field<'a> {
    number: u64,
    value: Value<'a>,
    bytes: &'a [u8],
}

enum Value<'a> {
    Bytes(&'a [u8]),
    Number(u64),
    Fixed,
}

fn damaged() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "CRIU has written files.img in an unknown form")
}

/// Takes bytes from the front.
fn take<'a>(from: &mut &'a [u8], count: usize) -> io::Result<&'a [u8]> {
    let (taken, rest) = from.split_at_checked(count).ok_or_else(damaged)?;
    *from = rest;
    Ok(taken)
}

fn take_number(from: &mut &[u8]) -> io::Result<u64> {
    let mut number = 0;
    for place in 0..10 {
        let byte = take(from, 1)?[0];
        number |= u64::from(byte & 0x7f) << (7 * place);
        if byte & 0x80 == 0 {
            return Ok(number);
        }
    }
    Err(damaged())
}

fn put_number(mut number: u64, to: &mut Vec<u8>) {
    while number > 0x7f {
        to.push(number as u8 | 0x80);
        number >>= 7;
    }
    to.push(number as u8);
}

/// A field that is a number.
fn put_number_field(field: u64, number: u64, to: &mut Vec<u8>) {
    put_number(field << 3, to);
    put_number(number, to);
}

fn fields(mut message: &[u8]) -> io::Result<Vec<Field<'_>>> {
    let mut found = Vec::new();
    while !message.is_empty() {
        let whole = message;
        let key = take_number(&mut message)?;
        let value = match key & 7 {
            0 => take_number(&mut message).map(Value::Number)?,
            1 => take(&mut message, 8).map(|_| Value::Fixed)?,
            2 => {
                let count = take_number(&mut message)?;
                Value::Bytes(take(&mut message, count as usize)?)
            }
            5 => take(&mut message, 4).map(|_| Value::Fixed)?,
            _ => return Err(damaged()),
        };
        found.push(Field { number: key >> 3, value, bytes: &whole[..whole.len() - message.len()] });
    }
    Ok(found)
}

/// What changes of the files.
pub struct Changes<'a> {
    /// The plain files that others replace, by their name there: they are of any size, and are used where they are.
    pub is_replaced: &'a dyn Fn(&str) -> bool,
    /// The sockets that lose their connection, by their inode.
    pub is_closed: &'a dyn Fn(u64) -> bool,
}

/// The header of an image, and its records.
fn records(image: &[u8]) -> io::Result<(&[u8], Vec<&[u8]>)> {
    let (header, mut rest) = image.split_at_checked(HEADER).ok_or_else(damaged)?;
    let mut found = Vec::new();
    while !rest.is_empty() {
        let count = u32::from_le_bytes(take(&mut rest, 4)?.try_into().map_err(|_| damaged())?);
        found.push(take(&mut rest, count as usize)?);
    }
    Ok((header, found))
}

fn put_record(record: &[u8], to: &mut Vec<u8>) {
    to.extend((record.len() as u32).to_le_bytes());
    to.extend(record);
}

/// A number of a message; the last one, if it has several.
fn number(fields: &[Field<'_>], wanted: u64) -> Option<u64> {
    let of_it = fields.iter().filter(|field| field.number == wanted);
    of_it.filter_map(|field| if let Value::Number(number) = field.value { Some(number) } else { None }).next_back()
}

/// The contents of `files.img`, changed.
pub fn changed(image: &[u8], changes: &Changes<'_>) -> io::Result<Vec<u8>> {
    let (header, records) = records(image)?;
    let mut new = header.to_vec();
    records.into_iter().try_for_each(|record| entry(record, changes).map(|record| put_record(&record, &mut new)))?;
    Ok(new)
}

/// A name that CRIU has given to a file which is not there by the one that it was opened by.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Link {
    /// The name.
    pub name: PathBuf,
    /// The one before.
    pub was: PathBuf,
}

/// The names that CRIU has given. `files`: the contents of `files.img`; `remaps`: those of `remap-fpath.img`.
pub fn links(files: &[u8], remaps: &[u8]) -> io::Result<Vec<Link>> {
    /// The kind of those that are found by such a name.
    const LINKED: u64 = 0;
    let mut names = BTreeMap::new();
    each_plain(files, |file, plain| names.extend(number(file, field::ID).zip(name(plain).map(PathBuf::from))))?;
    let mut found = Vec::new();
    for record in records(remaps)?.1 {
        let remap = fields(record)?;
        if number(&remap, field::KIND).unwrap_or(LINKED) == LINKED {
            let [was, name] = field::REMAP.map(|id| number(&remap, id).and_then(|id| names.get(&id)));
            let (was, name) = was.zip(name).ok_or_else(damaged)?;
            found.push(Link { name: name.clone(), was: was.clone() });
        }
    }
    Ok(found)
}

/// The sizes of plain files. `files`: the contents of `files.img`.
pub fn sizes(files: &[u8]) -> io::Result<BTreeMap<PathBuf, u64>> {
    let mut sizes = BTreeMap::new();
    each_plain(files, |_, plain| sizes.extend(name(plain).map(PathBuf::from).zip(number(plain, field::SIZE))))?;
    Ok(sizes)
}

/// Shows each plain file of `files.img`: what is known of every file, and of a plain one.
fn each_plain(files: &[u8], mut show: impl FnMut(&[Field<'_>], &[Field<'_>])) -> io::Result<()> {
    for record in records(files)?.1 {
        let file = fields(record)?;
        for plain in file.iter().filter(|field| field.number == field::PLAIN) {
            if let Value::Bytes(plain) = plain.value {
                show(&file, &fields(plain)?);
            }
        }
    }
    Ok(())
}

/// The addresses that Internet sockets have, here and there. `files`: the contents of `files.img`.
pub fn addresses(files: &[u8]) -> io::Result<BTreeSet<IpAddr>> {
    let [.., here, there] = field::ENDS;
    let mut found = BTreeSet::new();
    for record in records(files)?.1 {
        for socket in fields(record)?.iter().filter(|field| field.number == field::SOCKET) {
            let Value::Bytes(socket) = socket.value else { continue };
            let socket = fields(socket)?;
            for end in [here, there] {
                // Words as the kernel has them: one, or four.
                let words = socket.iter().filter(|field| field.number == end);
                let words = words.filter_map(|field| if let Value::Number(word) = field.value { Some(word as u32) } else { None });
                let bytes: Vec<_> = words.flat_map(u32::to_ne_bytes).collect();
                let address = <[u8; 4]>::try_from(&bytes[..]).map(IpAddr::from);
                found.extend(address.or_else(|_| <[u8; 16]>::try_from(&bytes[..]).map(IpAddr::from)));
            }
        }
    }
    Ok(found)
}

/// The contents of `filelocks.img`, without the locks of what is replaced: what takes its place may be another's, for which CRIU would wait. `is_replaced`:
/// by the process, and the descriptor there.
pub fn without_locks(image: &[u8], is_replaced: &dyn Fn(u64, u64) -> bool) -> io::Result<Vec<u8>> {
    let (header, records) = records(image)?;
    let mut new = header.to_vec();
    for record in records {
        let fields = fields(record)?;
        let [pid, descriptor] = field::OWNER.map(|wanted| number(&fields, wanted).unwrap_or_default());
        if !is_replaced(pid, descriptor) {
            put_record(record, &mut new);
        }
    }
    Ok(new)
}

/// The contents of `tty-info.img`, in which no terminal is that of a session whose leader is not in the image, such as the user's shell: CRIU looks for the
/// leader among the processes that it brings back. `is_there`: by the leader.
pub fn without_other_sessions(image: &[u8], is_there: &dyn Fn(u64) -> bool) -> io::Result<Vec<u8>> {
    let (header, records) = records(image)?;
    let mut new = header.to_vec();
    for record in records {
        let mut changed = Vec::new();
        for Field { number, value, bytes } in fields(record)? {
            match value {
                Value::Number(leader) if number == field::SESSION && !is_there(leader) => put_number_field(number, 0, &mut changed),
                _ => changed.extend(bytes),
            }
        }
        put_record(&changed, &mut new);
    }
    Ok(new)
}

fn entry(message: &[u8], changes: &Changes<'_>) -> io::Result<Vec<u8>> {
    let mut new = Vec::new();
    for Field { number, value, bytes } in fields(message)? {
        let new_value = match value {
            Value::Bytes(plain) if number == field::PLAIN => plain_file(plain, changes.is_replaced)?,
            Value::Bytes(socket) if number == field::SOCKET => closed_socket(socket, changes.is_closed)?,
            _ => {
                new.extend(bytes);
                continue;
            }
        };
        put_number(number << 3 | 2, &mut new);
        put_number(new_value.len() as u64, &mut new);
        new.extend(new_value);
    }
    Ok(new)
}

/// A socket as one that was never connected. Whoever uses it gets an error.
fn closed_socket(message: &[u8], is_meant: &dyn Fn(u64) -> bool) -> io::Result<Vec<u8>> {
    let fields = fields(message)?;
    let is_it = fields.iter().any(|field| field.number == field::INODE && matches!(field.value, Value::Number(inode) if is_meant(inode)));
    if !is_it {
        return Ok(message.to_vec());
    }
    let mut new = Vec::new();
    for Field { number, value, bytes } in fields {
        match value {
            Value::Number(_) if number == field::STATE => put_number_field(number, CLOSED, &mut new),
            Value::Number(_) if field::ENDS.contains(&number) => put_number_field(number, 0, &mut new),
            _ if number == field::SHUTDOWN => (),
            _ => new.extend(bytes),
        }
    }
    Ok(new)
}

/// The name in a `RegFileEntry`.
fn name<'a>(fields: &[Field<'a>]) -> Option<&'a str> {
    fields.iter().find_map(|field| match field.value {
        Value::Bytes(name) if field.number == field::NAME => str::from_utf8(name).ok(),
        _ => None,
    })
}

fn plain_file(message: &[u8], is_meant: &dyn Fn(&str) -> bool) -> io::Result<Vec<u8>> {
    let fields = fields(message)?;
    if !name(&fields).is_some_and(is_meant) {
        return Ok(message.to_vec());
    }
    let mut new = Vec::new();
    for Field { number, value, bytes } in fields {
        match (number, value) {
            (field::SIZE | field::MODE, _) => (),
            (field::FLAGS, Value::Number(flags)) => put_number_field(number, flags & !NO_LINKS, &mut new),
            (field::POSITION, _) => {
                // None.
                put_number_field(number, u64::MAX, &mut new);
            }
            _ => new.extend(bytes),
        }
    }
    Ok(new)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn number(field: u64, value: u64) -> Vec<u8> {
        let mut bytes = Vec::new();
        put_number(field << 3, &mut bytes);
        put_number(value, &mut bytes);
        bytes
    }

    fn bytes(field: u64, value: &[u8]) -> Vec<u8> {
        let mut bytes = Vec::new();
        put_number(field << 3 | 2, &mut bytes);
        put_number(value.len() as u64, &mut bytes);
        bytes.extend(value);
        bytes
    }

    fn image(name: &str, plain: &[Vec<u8>]) -> Vec<u8> {
        let plain = [plain.concat(), bytes(field::NAME, name.as_bytes())].concat();
        let record = [number(1, 1), number(2, 700), bytes(field::PLAIN, &plain)].concat();
        [&[7; HEADER][..], &(record.len() as u32).to_le_bytes(), &record].concat()
    }

    #[test]
    fn only_the_files_that_are_meant_lose_their_size() {
        let before =
            [number(2, 0x8401 | NO_LINKS), number(field::POSITION, 300), number(field::SIZE, 1 << 40), number(field::MODE, 0o100_600)];
        let after = [number(2, 0x8401), number(field::POSITION, u64::MAX)];
        let is_meant = |name: &str| name == "/log";
        let replaced = |image: &[u8]| changed(image, &Changes { is_replaced: &is_meant, is_closed: &|_| false });
        assert_eq!(replaced(&image("/log", &before)).unwrap(), image("/log", &after));
        assert_eq!(replaced(&image("/data", &before)).unwrap(), image("/data", &before));
        for cut in HEADER + 1..image("/log", &before).len() {
            assert!(replaced(&image("/log", &before)[..cut]).is_err(), "{cut}");
        }
    }

    #[test]
    fn the_names_that_criu_has_given_are_found() {
        let record = |record: Vec<u8>| [&(record.len() as u32).to_le_bytes()[..], &record].concat();
        let image = |records: &[Vec<u8>]| [&[7; HEADER][..], &records.concat()].concat();
        let file = |id, name: &str| {
            let plain = [number(1, id), bytes(field::NAME, name.as_bytes())].concat();
            record([number(1, 1), number(field::ID, id), bytes(field::PLAIN, &plain)].concat())
        };
        let remap = |was, name, kind: &[u8]| record([&number(1, was)[..], &number(2, name), kind].concat());
        let files = image(&[file(3, "/dev/shm/old"), file(4, "/dev/shm/link_remap.4"), file(5, "/dev/shm/gone")]);
        let remaps = image(&[remap(3, 4, &number(3, 0)), remap(5, 1, &number(3, 1)), remap(3, 4, &[])]);
        let link = Link { name: "/dev/shm/link_remap.4".into(), was: "/dev/shm/old".into() };
        assert_eq!(links(&files, &remaps).unwrap(), [link.clone(), link]);
        assert!(links(&files, &image(&[remap(3, 9, &[])])).is_err());
        assert!(links(&files[..files.len() - 1], &remaps).is_err());
    }

    #[test]
    fn the_sizes_of_plain_files_are_read() {
        assert_eq!(sizes(&image("/data", &[number(field::SIZE, 1 << 40)])).unwrap(), BTreeMap::from([("/data".into(), 1 << 40)]));
        // That of a device.
        assert!(sizes(&image("/dev/null", &[])).unwrap().is_empty());
    }

    #[test]
    fn only_the_locks_of_what_is_replaced_go() {
        let lock = |pid, file| {
            let record = [number(1, 2), number(2, 1), number(3, pid), number(4, file), number(5, 0), number(6, 0)].concat();
            [&(record.len() as u32).to_le_bytes()[..], &record].concat()
        };
        let image = |locks: &[Vec<u8>]| [&[7; HEADER][..], &locks.concat()].concat();
        let all = image(&[lock(25, 1), lock(25, 5), lock(26, 1)]);
        assert_eq!(without_locks(&all, &|pid, file| (pid, file) == (25, 1)).unwrap(), image(&[lock(25, 5), lock(26, 1)]));
        assert!(without_locks(&all[..all.len() - 1], &|_, _| false).is_err());
    }

    #[test]
    fn only_terminals_of_other_sessions_lose_theirs() {
        let terminal = |leader| {
            let record = [number(1, 3), number(2, 3), number(6, leader), number(7, 40), number(8, 34816), bytes(9, &[1])].concat();
            [&(record.len() as u32).to_le_bytes()[..], &record].concat()
        };
        let image = |leaders: &[u64]| [vec![7; HEADER], leaders.iter().flat_map(|leader| terminal(*leader)).collect()].concat();
        let all = image(&[39, 900, 0]);
        assert_eq!(without_other_sessions(&all, &|leader| leader == 900).unwrap(), image(&[0, 900, 0]));
        assert!(without_other_sessions(&all[..all.len() - 1], &|_| false).is_err());
    }

    #[test]
    fn the_addresses_of_sockets_are_found() {
        let words = |field, address: &[u8]| {
            address.chunks(4).map(|word| number(field, u32::from_ne_bytes(word.try_into().unwrap()).into())).collect::<Vec<_>>().concat()
        };
        let six = "fd00::2".parse::<std::net::Ipv6Addr>().unwrap();
        let socket = [number(2, 7), words(11, &[192, 0, 2, 2]), words(12, &six.octets())].concat();
        let record = [number(1, 2), number(2, 9), bytes(field::SOCKET, &socket)].concat();
        let image = [&[7; HEADER][..], &(record.len() as u32).to_le_bytes(), &record].concat();
        assert_eq!(addresses(&image).unwrap(), BTreeSet::from([IpAddr::from([192, 0, 2, 2]), six.into()]));
        assert!(addresses(&image[..image.len() - 1]).is_err());
    }

    #[test]
    fn only_the_sockets_that_are_meant_lose_their_connection() {
        let image = |inode, state, ends: [u64; 4], rest: &[u8]| {
            let [own, other, here, there] = ends;
            let socket = [number(1, 5), number(2, inode), number(6, state), number(7, own), number(8, other)];
            let socket = [socket.concat(), number(11, here), number(12, there), rest.to_vec()].concat();
            let record = [number(1, 2), number(2, 9), bytes(field::SOCKET, &socket)].concat();
            [&[7; HEADER][..], &(record.len() as u32).to_le_bytes(), &record].concat()
        };
        let close = |image: &[u8]| changed(image, &Changes { is_replaced: &|_| false, is_closed: &|inode| inode == 77 }).unwrap();
        let ends = [8000, 40000, 0x0100_007f, 0x0100_0a0a];
        assert_eq!(close(&image(77, 1, ends, &number(19, 1))), image(77, 7, [0; 4], &[]));
        assert_eq!(close(&image(78, 1, ends, &number(19, 1))), image(78, 1, ends, &number(19, 1)));
    }
}
