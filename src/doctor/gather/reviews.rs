//! Whether the API server answers what the daemon asks about the clients of `/metrics`. Each
//! question is one that the daemon asks too, and stores nothing.

use super::super::Facts;
use super::{AddFacts, ReaderInput, dra};
use crate::cluster::UserInfo;

/// No client has this token, and no user has this name.
const UNKNOWN: &str = "holdfast-doctor";

pub(super) fn reviews(input: &ReaderInput) -> AddFacts {
    let Some(config) = input.config.as_ref().filter(|config| config.authorize) else {
        return Box::new(|_| ());
    };
    let client = dra::client(input, config);
    let questions = async {
        client.user_of_token(UNKNOWN).await?;
        let unknown = UserInfo { username: UNKNOWN.into(), ..UserInfo::default() };
        client.may_get(&unknown, "/metrics").await.map(drop)
    };
    let reviews = dra::answer(input, questions);
    Box::new(|facts: &mut Facts| facts.reviews = reviews)
}
