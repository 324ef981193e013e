//! The claims of a request that the driver may see, and one answer for each UID.
//!
//! The kubelet refuses a response that lacks a UID of the request, or that has another one. An
//! empty error text means success to it.

use super::Answers;
use crate::domain::{ClaimRef, printable};
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use tonic::Status;

/// Claims in one request. A request has the claims of one pod, and a pod has a few.
pub(super) const CLAIMS_MAX: usize = 1024;

/// Bytes of a UID. The API server generates UUIDs of 36.
const UID_BYTES_MAX: usize = 64;

/// Bytes of a namespace: a DNS label (RFC 1123).
const NAMESPACE_BYTES_MAX: usize = 63;

/// Bytes of the name of an object: a DNS subdomain.
const NAME_BYTES_MAX: usize = 253;

/// Bytes of an error text. The API server accepts 1024 in the message of an event.
pub(super) const ERROR_BYTES_MAX: usize = 1024;

/// The limit of a request: the longest claims, with the tags and lengths of their fields.
pub(super) const REQUEST_BYTES_MAX: usize =
    CLAIMS_MAX * (UID_BYTES_MAX + NAMESPACE_BYTES_MAX + NAME_BYTES_MAX + 16);

/// The error for a claim that the driver did not answer.
const NO_ANSWER: &str = "the driver did not answer for this claim";

/// The answers of one request by UID; the text of an error is not empty.
pub(super) type ByUid<T> = BTreeMap<String, Result<T, String>>;

/// Asks the driver for all valid claims of a request, and answers every UID once.
///
/// # Errors
/// When the request has more than [`CLAIMS_MAX`] claims.
pub(super) async fn answer<T, F: Future<Output = Answers<T>>>(
    claims: Vec<ClaimRef>,
    ask: impl FnOnce(Vec<ClaimRef>) -> F,
) -> Result<ByUid<T>, Status> {
    if claims.len() > CLAIMS_MAX {
        let problem =
            format!("the request has {} claims, more than {CLAIMS_MAX}; split it", claims.len());
        return Err(Status::invalid_argument(problem));
    }
    let mut slots = slots(&claims);
    let valid = |claim: &ClaimRef| slots.get(&claim.uid).is_some_and(Option::is_none);
    let valid: Vec<ClaimRef> = claims.into_iter().filter(valid).collect();
    if !valid.is_empty() {
        for (claim, result) in ask(valid).await {
            match slots.get_mut(&claim.uid) {
                Some(slot @ None) => *slot = Some(result),
                _ => tracing::error!(uid = %claim.uid, "an answer for a claim that was not asked"),
            }
        }
    }
    let answered = |(uid, slot): (String, Option<Result<T, String>>)| {
        let result = slot.unwrap_or_else(|| Err(NO_ANSWER.to_owned()));
        (uid, result.map_err(|text| error_text(&text)))
    };
    Ok(slots.into_iter().map(answered).collect())
}

/// A slot for each UID: empty where the driver must answer, else with an error.
fn slots<T>(claims: &[ClaimRef]) -> BTreeMap<String, Option<Result<T, String>>> {
    let mut slots = BTreeMap::new();
    for claim in claims {
        match slots.entry(claim.uid.clone()) {
            Entry::Vacant(slot) => {
                slot.insert(invalid(claim).map(|problem| Err(problem.to_owned())));
            }
            Entry::Occupied(mut slot) => {
                slot.insert(Some(Err("the request has this UID more than once".to_owned())));
            }
        }
    }
    slots
}

/// Why a claim cannot be one of the API server's. UID, namespace and name become parts of paths and
/// file names, so they have only the characters of API names.
fn invalid(claim: &ClaimRef) -> Option<&'static str> {
    let is_of = |text: &str, bytes_max: usize, others: &[u8]| {
        let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || others.contains(&byte);
        !text.is_empty() && text.len() <= bytes_max && text.bytes().all(is_allowed)
    };
    if !is_of(&claim.uid, UID_BYTES_MAX, b"-") {
        return Some("the UID of the claim is empty, too long or has other characters than a UID");
    }
    if !is_of(&claim.namespace, NAMESPACE_BYTES_MAX, b"-") {
        return Some("the namespace of the claim is not a DNS label");
    }
    let is_name = is_of(&claim.name, NAME_BYTES_MAX, b"-.") && !claim.name.starts_with('.');
    (!is_name).then_some("the name of the claim is not a DNS subdomain")
}

/// An error on one line that fits an event, and is not empty.
pub(super) fn error_text(text: &str) -> String {
    let text = printable(text);
    let text = cut(&text, ERROR_BYTES_MAX);
    if text.is_empty() { "the driver gave no reason".to_owned() } else { text.to_owned() }
}

/// The beginning of a text with at most `bytes_max` bytes, without a part of a character.
pub(super) fn cut(text: &str, bytes_max: usize) -> &str {
    text.get(..text.floor_char_boundary(bytes_max)).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn claim(uid: &str) -> ClaimRef {
        ClaimRef { uid: uid.into(), namespace: "team".into(), name: "gpu".into() }
    }

    /// A UID and its answer.
    type Answered = (String, Result<u8, String>);

    /// Answers a request with a driver that has these results, and returns what the driver was
    /// asked too.
    fn answered(
        claims: Vec<ClaimRef>,
        results: impl FnOnce(&[ClaimRef]) -> Answers<u8>,
    ) -> (Vec<String>, Vec<Answered>) {
        let mut asked = Vec::new();
        let answers = answer(claims, |claims| {
            asked = claims.iter().map(|claim| claim.uid.clone()).collect();
            std::future::ready(results(&claims))
        });
        let answers = futures_util::FutureExt::now_or_never(answers).unwrap().unwrap();
        (asked, answers.into_iter().collect())
    }

    fn all_ok(claims: &[ClaimRef]) -> Answers<u8> {
        claims.iter().map(|claim| (claim.clone(), Ok(7))).collect()
    }

    #[test]
    fn an_empty_repeated_or_impossible_uid_gets_an_error_and_the_others_an_answer() {
        let long = "x".repeat(UID_BYTES_MAX + 1);
        let uids = ["a", "b", "", "b", "../../etc", &long, "c", ""];
        let (asked, answers) = answered(uids.map(claim).to_vec(), all_ok);
        assert_eq!(asked, ["a", "c"]);
        let (ok, failed): (Vec<_>, Vec<_>) =
            answers.into_iter().partition(|(_, result)| result.is_ok());
        assert_eq!(ok.iter().map(|(uid, _)| uid.as_str()).collect::<Vec<_>>(), ["a", "c"]);
        let failed: Vec<&str> = failed.iter().map(|(uid, _)| uid.as_str()).collect();
        assert_eq!(failed, ["", "../../etc", "b", &long]);
    }

    #[test]
    fn a_claim_that_the_driver_forgets_gets_an_error_and_one_that_it_adds_no_answer() {
        let (_, answers) = answered(vec![claim("a"), claim("b")], |_| {
            vec![(claim("a"), Ok(1)), (claim("a"), Err("second".into())), (claim("z"), Ok(2))]
        });
        assert_eq!(answers, [("a".to_owned(), Ok(1)), ("b".to_owned(), Err(NO_ANSWER.to_owned()))]);
    }

    #[test]
    fn names_that_are_no_api_names_are_refused() {
        for (namespace, name) in
            [("", "gpu"), ("a/b", "gpu"), ("team", ""), ("team", ".."), ("team", "a\nb")]
        {
            let claim = ClaimRef { namespace: namespace.into(), name: name.into(), ..claim("a") };
            let (asked, answers) = answered(vec![claim], all_ok);
            assert!(asked.is_empty() && answers[0].1.is_err(), "{namespace:?} {name:?}");
        }
        let longest = ClaimRef {
            uid: "u".repeat(UID_BYTES_MAX),
            namespace: "n".repeat(NAMESPACE_BYTES_MAX),
            name: "c".repeat(NAME_BYTES_MAX),
        };
        assert_eq!(answered(vec![longest], all_ok).0.len(), 1);
    }

    #[test]
    fn a_request_with_too_many_claims_is_refused() {
        let claims = |count| (0..count).map(|n| claim(&n.to_string())).collect::<Vec<_>>();
        assert_eq!(answered(claims(CLAIMS_MAX), all_ok).1.len(), CLAIMS_MAX);
        let refused = answer(claims(CLAIMS_MAX + 1), |claims| std::future::ready(all_ok(&claims)));
        let refused = futures_util::FutureExt::now_or_never(refused).unwrap().unwrap_err();
        assert_eq!(refused.code(), tonic::Code::InvalidArgument);
    }

    /// To the kubelet an empty text is a success.
    #[test]
    fn an_error_is_never_an_empty_text_and_fits_an_event() {
        let error = |text: &str| {
            let (_, answers) =
                answered(vec![claim("a")], |_| vec![(claim("a"), Err(text.to_owned()))]);
            answers[0].1.clone().unwrap_err()
        };
        assert!(!error("").is_empty());
        assert_eq!(error("first\nsecond"), "first\\nsecond");
        let long = error(&"ü".repeat(ERROR_BYTES_MAX));
        assert_eq!(long, "ü".repeat(ERROR_BYTES_MAX / 2));
        assert_eq!(error(&format!("x{}", "ü".repeat(ERROR_BYTES_MAX))).len(), ERROR_BYTES_MAX - 1);
    }

    proptest! {
        #[test]
        fn every_uid_of_a_request_is_answered_and_no_other(
            uids in prop::collection::vec("[a-c/]{0,2}", 0..12),
            returned in prop::collection::vec("[a-c/]{0,2}", 0..12),
        ) {
            let claims: Vec<ClaimRef> = uids.iter().map(|uid| claim(uid)).collect();
            let results = returned.iter().map(|uid| (claim(uid), Ok(1))).collect();
            let (_, answers) = answered(claims, |_| results);
            let answered: Vec<String> = answers.into_iter().map(|(uid, _)| uid).collect();
            let mut expected = uids;
            expected.sort();
            expected.dedup();
            prop_assert_eq!(answered, expected);
        }
    }
}
