//! How many containers share a device, and how many shares one container may have.

use super::error::hidden;
use super::fragments::Resource;
use crate::domain::{Contract, PerContainer, Sharing};

/// The limit of shares of a device. With this many, the kubelet's list has 1 MB, and one message
/// may have 4 MiB. An entry in the ledger has 1.8 MB, and the limit is 2 MB
/// (`store/journal/codec.rs`). An id such as `GPU-<uuid>::16383` takes 64 bytes in the list and 109
/// in the ledger.
pub(super) const SHARES_MAX: u32 = 16_384;

pub(super) fn sharing(
    resource: &Resource,
    contract: &Contract,
) -> Result<(Sharing, PerContainer), String> {
    let sharing = match (resource.replicas, resource.pool) {
        (Some(_), Some(_)) => {
            return Err(
                "`replicas` and `pool` exclude each other, as every container of a pool gets all \
                 its devices; set only one of them"
                    .into(),
            );
        }
        (None, Some(containers)) => Sharing::Pool(in_range("pool", containers)?),
        (replicas, None) => Sharing::replicas(in_range("replicas", replicas.unwrap_or(1))?),
    };
    match (sharing, contract) {
        (Sharing::Pool(_), Contract::Generic | Contract::RdmaShared) => {}
        (Sharing::Pool(_), other) => {
            let kind = other.kind();
            return Err(format!(
                "the contract `{kind}` names single devices, but a `pool` has none; use the \
                 contract `generic` or `rdma-shared`"
            ));
        }
        (_, Contract::RdmaShared) => {
            return Err(
                "the contract `rdma-shared` gives all devices to every container; set the number \
                 of containers, as in pool = 100"
                    .into(),
            );
        }
        _ => {}
    }
    // A client of MPS has one share; NVIDIA's plugin offers no other choice there.
    let usual = || match contract {
        Contract::Nvidia(options) if options.mps_root.is_some() => PerContainer::One,
        _ => PerContainer::Any,
    };
    let per_container = resource.per_container.unwrap_or_else(usual);
    if per_container == PerContainer::Distinct && !matches!(sharing, Sharing::Replicas(_)) {
        return Err(
            "`per_container` = \"distinct\" selects among shares, and this resource has none; set \
             `replicas`"
                .into(),
        );
    }
    Ok((sharing, per_container))
}

fn in_range(key: &str, containers: u32) -> Result<u32, String> {
    let is_possible = (1..=SHARES_MAX).contains(&containers);
    is_possible.then_some(containers).ok_or_else(|| {
        format!("`{key}` is {}, but must be between 1 and {SHARES_MAX}", hidden(containers))
    })
}

#[cfg(test)]
mod tests {
    use super::super::{Node, load};
    use crate::domain::{PerContainer, Sharing};

    /// The sharing of a resource with these keys, or the error message.
    fn sharing(text: &str) -> Result<(Sharing, PerContainer), String> {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("config.toml");
        std::fs::write(
            &file,
            format!("[[resource]]\nname = \"a.b/c\"\nclass = \"rdma\"\n{text}\n"),
        )
        .unwrap();
        let config = load(Some(&file), &Node::default()).map_err(|error| error.in_full())?;
        Ok((config.resources[0].sharing, config.resources[0].per_container))
    }

    #[test]
    fn a_device_is_exclusive_shared_or_in_a_pool() {
        for (text, expected) in [
            ("", (Sharing::Exclusive, PerContainer::Any)),
            ("replicas = 1\nper_container = \"one\"", (Sharing::Exclusive, PerContainer::One)),
            (
                "replicas = 4\nper_container = \"distinct\"",
                (Sharing::Replicas(4), PerContainer::Distinct),
            ),
            ("pool = 1", (Sharing::Pool(1), PerContainer::Any)),
            (
                "pool = 100\ncontract = \"rdma-shared\"\nper_container = \"one\"",
                (Sharing::Pool(100), PerContainer::One),
            ),
            (
                "replicas = 4\ncontract = \"nvidia\"\nnvidia = { mps_root = \"/run/mps\" }",
                (Sharing::Replicas(4), PerContainer::One),
            ),
        ] {
            assert_eq!(sharing(text), Ok(expected), "{text}");
        }
    }

    #[test]
    fn every_mistake_is_one_sentence() {
        for (text, expected) in [
            ("replicas = 2\npool = 2", "`replicas` and `pool` exclude each other"),
            ("pool = 0", "`pool` is 0, but must be between 1 and 16384"),
            ("replicas = 16385", "`replicas` is 16385, but must be between 1 and 16384"),
            ("pool = 2\ncontract = \"sriov\"", "the contract `sriov` names single devices"),
            ("contract = \"rdma-shared\"", "set the number of containers, as in pool = 100"),
            ("per_container = \"distinct\"", "and this resource has none; set `replicas`"),
            (
                "pool = 9\nper_container = \"distinct\"",
                "and this resource has none; set `replicas`",
            ),
            ("per_container = \"once\"", "unknown value `once`; did you mean `one`?"),
        ] {
            let sentence = sharing(text).unwrap_err();
            assert!(sentence.contains(expected), "{sentence}\nshould contain: {expected}");
            assert_eq!(sentence.lines().count(), 1, "{sentence}");
        }
    }
}
