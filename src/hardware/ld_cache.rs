//! The loader's list of libraries, `/etc/ld.so.cache` (glibc, `dl-cache.h`): the paths of libraries
//! that are not in a usual folder.

/// The begin of a cache of glibc before 2.32, with an older list in front of the present one.
const OLD_MAGIC: &[u8] = b"ld.so-1.7.0\0";
const OLD_HEADER: usize = 16;
const OLD_ENTRY: usize = 12;
const MAGIC: &[u8] = b"glibc-ld.so.cache1.1";
const HEADER: usize = 48;
const ENTRY: usize = 24;
/// The flags of 64-bit libraries of x86-64, aarch64 and ppc64le.
const FLAGS_64: [u32; 3] = [0x0303, 0x0a03, 0x0503];

/// The paths of the 64-bit libraries. Empty for a text that is not a cache.
pub(super) fn paths(cache: &[u8]) -> Vec<String> {
    let begin = if cache.starts_with(OLD_MAGIC) {
        let entries = number(cache, OLD_MAGIC.len()).unwrap_or_default();
        (OLD_HEADER + entries.saturating_mul(OLD_ENTRY)).next_multiple_of(8)
    } else {
        0
    };
    let Some(cache) = cache.get(begin..).filter(|cache| cache.starts_with(MAGIC)) else {
        return Vec::new();
    };
    let entries = number(cache, MAGIC.len()).unwrap_or_default();
    let path = |entry: &[u8]| {
        let flags = u32::try_from(number(entry, 0)?).ok()?;
        let text = cache.get(number(entry, 8)?..)?;
        let end = text.iter().position(|byte| *byte == 0)?;
        let path = std::str::from_utf8(&text[..end]).ok()?;
        (FLAGS_64.contains(&flags) && path.starts_with('/')).then(|| path.to_owned())
    };
    let list = cache.get(HEADER..).unwrap_or_default();
    list.chunks_exact(ENTRY).take(entries).filter_map(path).collect()
}

/// A number of 32 bits, in the order of x86 and ARM.
fn number(bytes: &[u8], at: usize) -> Option<usize> {
    let bytes = bytes.get(at..at.checked_add(4)?)?;
    usize::try_from(u32::from_le_bytes(bytes.try_into().ok()?)).ok()
}

/// A cache with these libraries, for tests.
#[cfg(test)]
pub(super) fn of(paths: &[(u32, &str)], old: bool) -> Vec<u8> {
    let mut cache = Vec::new();
    if old {
        cache.extend_from_slice(OLD_MAGIC);
        cache.extend(3_u32.to_le_bytes());
        cache.extend([0; 3 * OLD_ENTRY]);
        cache.resize(cache.len().next_multiple_of(8), 0);
    }
    let begin = cache.len();
    cache.extend_from_slice(MAGIC);
    cache.extend(u32::try_from(paths.len()).unwrap().to_le_bytes());
    cache.resize(begin + HEADER, 0);
    let mut texts = Vec::new();
    for (flags, path) in paths {
        let at = HEADER + paths.len() * ENTRY + texts.len();
        cache.extend(flags.to_le_bytes());
        cache.extend([0; 4]);
        cache.extend(u32::try_from(at).unwrap().to_le_bytes());
        cache.extend([0; 12]);
        texts.extend_from_slice(path.as_bytes());
        texts.push(0);
    }
    cache.extend(texts);
    cache
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_whole_64_bit_entries_count() {
        let libraries = [
            (0x0303, "/opt/nvidia/libcuda.so.1"),
            (0x0003, "/usr/lib32/libcuda.so.1"),
            (0x0a03, "/x"),
        ];
        for old in [false, true] {
            let cache = of(&libraries, old);
            assert_eq!(paths(&cache), ["/opt/nvidia/libcuda.so.1", "/x"], "old: {old}");
            for end in 0..cache.len() {
                // A file that is cut off anywhere.
                drop(paths(&cache[..end]));
            }
        }
        assert!(paths(b"").is_empty() && paths(b"glibc-ld.so.cache1.1").is_empty());
    }

    #[test]
    fn the_cache_of_this_machine_can_be_read() {
        let Ok(cache) = std::fs::read("/etc/ld.so.cache") else { return };
        assert!(paths(&cache).iter().any(|path| path.contains("/libc.so.")));
    }
}
