//! The page at `/` and `holdfast topology` of a daemon with content: pods with hostile names, a
//! broken device, a cordoned one. If a Chromium is installed, it renders the page too;
//! `HOLDFAST_SCREENSHOTS` names a folder for its screenshots.

use crate::common::inside::{has_program, say};
use crate::common::{Daemon, HANG, Node, http_get, name, offered, run, soon, telemetry, until};
use holdfast::lab::sim::hardware::SimNode;
use holdfast::lab::sim::kubelet::{Kubelet, PodSpec};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

const CONFIG: &str = r#"
[telemetry]
listen = "127.0.0.1:0"

[[resource]]
name = "nvidia.com/gpu"
class = "gpu"

[[resource]]
name = "example.com/hca"
class = "rdma"
select = { vf = true }
"#;

/// Without a slash: the kubelet makes a folder of it.
const HOSTILE: &str = "<img src=x onerror=alert(1)>&amp;\"'";

struct Shown {
    node: Node,
    kubelet: Kubelet,
    daemon: Daemon,
    hardware: SimNode,
    page: SocketAddr,
}

async fn shown() -> Shown {
    let node = Node::new();
    let hardware = SimNode::create(node.path("host")).unwrap();
    node.write_config(CONFIG);
    let kubelet = node.start_kubelet().await;
    let daemon = node.start_daemon();
    let page = telemetry(&daemon).await;
    let (gpu, hca) = (name("nvidia.com/gpu"), name("example.com/hca"));
    offered(&kubelet, &gpu, 8).await;
    offered(&kubelet, &hca, 8).await;
    for (pod, gpus) in [("train-0", 2), (HOSTILE, 1)] {
        let mut pod = PodSpec::new("ml", pod).app("main", &gpu, gpus);
        pod.containers[0].resources.insert(hca.clone(), 1);
        soon("a pod", kubelet.add_pod(pod)).await;
    }
    hardware.remove_gpu_node(7).unwrap();
    let cordoned =
        node.output(&["device", "cordon", &hardware.gpu_uuid(6), "--reason", "fan <b>noise</b>"]);
    assert!(cordoned.status.success(), "{}", String::from_utf8_lossy(&cordoned.stderr));
    offered(&kubelet, &gpu, 6).await;
    // A pod's name may be known slightly later than its grant.
    until("both pods are known", || answer(page, "/"), |html| html.matches("<td>ml/").count() == 4)
        .await;
    Shown { node, kubelet, daemon, hardware, page }
}

/// The whole answer, with its head.
fn answer(address: SocketAddr, path: &str) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(HANG)).unwrap();
    write!(stream, "GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

#[test]
fn the_page_and_the_picture_show_what_the_daemon_knows() {
    run(async {
        let Shown { node, kubelet, daemon, hardware, page } = shown().await;
        let html = answer(page, "/");
        for wanted in [
            "HTTP/1.1 200 OK",
            "content-type: text/html; charset=utf-8",
            "content-security-policy: default-src 'none'; style-src 'unsafe-inline'",
            "<td>nvidia.com/gpu</td>",
            "one device is unhealthy",
            "node_missing",
            "cordoned",
            "<td>ml/train-0</td>",
            "ml/&lt;img src=x onerror=alert(1)&gt;&amp;amp;&quot;&#39;",
            "host bridge 0000:15",
            "etc/config.toml",
        ] {
            assert!(html.contains(wanted), "`{wanted}` is not in {html}");
        }
        assert!(!html.contains("<img") && !html.contains("<b>"), "{html}");
        assert!(!html.contains("noise"), "an operator's words are for root: {html}");
        assert!(html.len() < 256 * 1024, "{} bytes", html.len());
        assert!(
            !html.contains("http-equiv") && answer(page, "/?refresh=5").contains("content=\"5\"")
        );
        assert_eq!(http_get(page, "/metrics").0, 200, "the other files are unchanged");

        let text = String::from_utf8(node.output(&["topology"]).stdout).unwrap();
        let line = |id: usize| {
            text.lines().find(|line| line.contains(&hardware.gpu_address(id).to_string())).unwrap()
        };
        assert!(
            line(7).contains("node_missing") && line(6).contains("cordoned (fan <b>noise</b>)"),
            "{text}"
        );
        assert!(text.contains("ml/train-0"), "{text}");
        let json = node.json(&["topology"]);
        assert_eq!((&json["schema"], &json["parts"][0]["kind"]), (&1.into(), &"numa_node".into()));
        let svg = node.path("node.svg");
        assert!(node.output(&["topology", "--svg", svg.to_str().unwrap()]).status.success());
        let svg = std::fs::read_to_string(svg).unwrap();
        assert!(
            svg.starts_with("<svg ") && svg.contains("ml/train-0") && !svg.contains("<img"),
            "{svg}"
        );

        watched(&node);

        // Without a daemon, the holders come from the ledger.
        let mut daemon = daemon;
        daemon.kill();
        let text = String::from_utf8(node.output(&["topology"]).stdout).unwrap();
        assert!(text.contains("ml/train-0") && text.contains("cordoned"), "{text}");
        drop(kubelet);
    });
}

/// `who --watch` in a pipe: one document a line, and Ctrl-C is a clean end.
fn watched(node: &Node) {
    let mut watch = node
        .command(&["who", "--watch", "0.1", "-o", "json"])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(watch.stdout.take().unwrap()).lines();
    for _ in 0..2 {
        let document: serde_json::Value =
            serde_json::from_str(&lines.next().unwrap().unwrap()).unwrap();
        assert_eq!(document["grants"].as_array().unwrap().len(), 4, "{document}");
    }
    kill(Pid::from_raw(i32::try_from(watch.id()).unwrap()), Signal::SIGINT).unwrap();
    assert_eq!(watch.wait().unwrap().code(), Some(0));
    let coloured = String::from_utf8(node.output(&["who", "--color", "always"]).stdout).unwrap();
    let plain = String::from_utf8(node.output(&["who"]).stdout).unwrap();
    assert!(
        coloured.contains("\x1b[32mbound\x1b[0m") && !plain.contains('\x1b'),
        "{coloured}{plain}"
    );
    assert_eq!(
        node.output(&["who", "-o", "svg"]).status.code(),
        Some(2),
        "nothing else is a picture"
    );
}

/// A browser, by any of its names.
fn browser() -> Option<&'static str> {
    ["chromium", "chromium-browser", "google-chrome", "chrome"]
        .into_iter()
        .find(|program| has_program(program))
}

fn look(browser: &str, arguments: &[&str], url: &str, home: &Path) -> Vec<u8> {
    let mut command = Command::new(browser);
    command.args([
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--hide-scrollbars",
        "--no-first-run",
    ]);
    let output = command
        .arg(format!("--user-data-dir={}", home.display()))
        .args(arguments)
        .arg(url)
        .output()
        .unwrap();
    assert!(output.status.success(), "{browser}: {}", String::from_utf8_lossy(&output.stderr));
    output.stdout
}

#[test]
fn a_browser_renders_the_page_on_desktop_and_phone_in_light_and_dark() {
    let Some(browser) = browser() else {
        say(
            "SKIPPED: a_browser_renders_the_page_on_desktop_and_phone_in_light_and_dark: there is no chromium",
        );
        return;
    };
    run(async {
        let Shown { node, kubelet, daemon, page, .. } = shown().await;
        let home = node.path("browser");
        let folder = std::env::var_os("HOLDFAST_SCREENSHOTS")
            .map_or_else(|| node.path("seen"), PathBuf::from);
        // The kubelet needs this thread meanwhile.
        let looked = tokio::task::spawn_blocking(move || {
            looked_at(browser, &format!("http://{page}/"), &home, &folder);
        });
        looked.await.unwrap();
        drop((kubelet, daemon));
    });
}

fn looked_at(browser: &str, url: &str, home: &Path, folder: &Path) {
    let dom = String::from_utf8(look(browser, &["--dump-dom"], url, home)).unwrap();
    // As parsed by the browser: the hostile name is text, and nothing is missing.
    assert!(
        dom.contains("ml/&lt;img src=x")
            && !dom.contains("<img")
            && dom.trim_end().ends_with("</html>"),
        "{dom}"
    );
    std::fs::create_dir_all(folder).unwrap();
    let mut seen = Vec::new();
    for (device, size) in [("desk", "1280,2000"), ("phone", "500,2000")] {
        for (hour, scheme) in [("day", 1), ("night", 0)] {
            let file = folder.join(format!("{device}-{hour}.png"));
            let screenshot = format!("--screenshot={}", file.display());
            let arguments = [
                &screenshot,
                &format!("--window-size={size}"),
                &format!("--blink-settings=preferredColorScheme={scheme}"),
            ];
            look(browser, &arguments.map(String::as_str), url, home);
            seen.push(std::fs::read(&file).unwrap());
        }
    }
    assert!(
        seen.iter().all(|png| png.starts_with(b"\x89PNG") && png.len() > 10_000),
        "a page without a picture"
    );
    assert!(seen[0] != seen[1] && seen[2] != seen[3], "night is as day");
}
