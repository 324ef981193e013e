//! The HTTP server at the configured `listen` address: the probes, the metrics and the page.

use super::views::Views;
use super::{measures, page};
use crate::config::Config;
use crate::telemetry::Token;
use crate::telemetry::http::{self, Pages};
use std::path::Path;
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// Serves the configured address, with at most `connections` connections at a time. `None` without
/// an address.
pub(crate) fn serve(
    config: &Config,
    state_dir: &Path,
    views: &Views,
    connections: usize,
    not_served: watch::Sender<Option<String>>,
) -> Option<JoinHandle<()>> {
    let address = config.listen?;
    let pages = Pages::new(config.token_file.clone().map(Token::new));
    let scrape = measures::scrape(views.clone(), state_dir.to_owned());
    let routes = http::routes(scrape, views.ready.clone(), pages.clone())
        .merge(page::routes(views.clone(), pages));
    Some(http::serve(address, routes, connections, not_served))
}
