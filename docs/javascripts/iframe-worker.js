// Browsers refuse workers to pages that are opened as files. There, the site's search runs in a
// hidden frame instead, under the name by which the theme's search worker asks for it.
if (location.protocol === "file:") {
  class IFrameWorker extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.appendChild(this.frame);
      this.ready = new Promise((resolve) => {
        const scope = this.frame.contentWindow;
        const load = (source) =>
          new Promise((loaded) => {
            const script = scope.document.createElement("script");
            script.src = source;
            script.onload = loaded;
            scope.document.body.appendChild(script);
          });
        scope.importScripts = (...sources) =>
          sources.reduce((before, source) => before.then(() => load(source)), Promise.resolve());
        scope.postMessage = (data) =>
          this.dispatchEvent(new MessageEvent("message", { data }));
        load(url).then(resolve);
      });
    }

    postMessage(data) {
      this.ready.then(() =>
        this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data })),
      );
    }

    terminate() {
      this.frame.remove();
    }
  }
  window.IFrameWorker = IFrameWorker;
  window.Worker = IFrameWorker;
}
